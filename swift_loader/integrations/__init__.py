"""Callbacks for training frameworks, one module per framework. Only that module imports the framework.

Fabric and Accelerate need no callback: they save and load any object with `state_dict` and `load_state_dict`.
"""
