"""Triton kernels, each where a launch or a synchronisation is saved. Import a module only on a device that runs it."""
