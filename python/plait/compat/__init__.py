"""Stand-ins for other attention libraries: the names and argument orders of theirs over plait's functions.

Called by users: `from plait.compat.flash_attn_2 import flash_attn_func`. Nothing here is imported by `import plait`.
"""
