"""What training frameworks need beyond the loader itself: one module for each, which alone imports it.

Fabric and Accelerate need nothing: they save and load whatever has `state_dict` and `load_state_dict`.
"""
