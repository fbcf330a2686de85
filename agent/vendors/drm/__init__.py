"""Code for vendors whose GPUs need only device nodes from the host.

The device nodes are those of the Direct Rendering Manager (DRM), and those that all GPUs of a vendor share, such as
/dev/kfd.
"""
