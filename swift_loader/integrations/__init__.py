"""What training frameworks need beside the loader, one module per framework. Only that module imports the framework.

Fabric needs nothing: it saves and loads any object with `state_dict` and `load_state_dict`.
"""
