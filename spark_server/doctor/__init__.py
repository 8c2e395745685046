"""`spark doctor`: whether this machine, this environment and a model are fit to serve.

Each check finds one line, ok, warn or fail, with the way out; nothing here serves anything.
"""
