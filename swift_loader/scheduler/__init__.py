"""Decides which worker builds which batch, which batch comes next, and what happens when workers die or hang.

Everything here is pure: no descriptors, threads, processes or clocks. Events and times come in, actions go out.
"""
