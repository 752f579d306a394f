"""Bridges from plait to other libraries; nothing here is imported by `import plait`.

Called by users: `import plait.integrations.transformers`.
"""
