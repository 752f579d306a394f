#!python
"""The `plait` command of the Python package: runs the program that the package carries in plait/bin.

Called from the shell; pip puts it on the PATH. It never imports plait, so it starts at once and needs no torch.
"""

import importlib.util
import os
import sys

spec = importlib.util.find_spec("plait")
folders = list(spec.submodule_search_locations or []) if spec else []
for folder in folders:
    program = os.path.join(folder, "bin", "plait")
    if os.access(program, os.X_OK):
        os.execv(program, ["plait", *sys.argv[1:]])
sys.exit(f"plait: no bin/plait in {folders or 'any installed package'}: install the package again (pip install plait)")
