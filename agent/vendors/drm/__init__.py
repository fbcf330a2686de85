"""Code for vendors whose GPUs need only device nodes from the host.

These are nodes of the Direct Rendering Manager (DRM), and nodes that all GPUs of a vendor share, such as /dev/kfd.
"""
