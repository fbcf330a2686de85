"""Names that Intel's Kubernetes device plugin gives to resources (cmd/gpu_plugin). Pure."""

RESOURCE_PREFIX = "gpu.intel.com/"
"""The resources are `gpu.intel.com/i915` and `gpu.intel.com/xe`, named after the kernel driver."""
HARMLESS_RESOURCES = ("gpu.intel.com/monitoring", "gpu.intel.com/*_monitoring")
"""Patterns (fnmatch) of resources with which a pod can monitor all GPUs. By default, the plugin now offers only the
resource that the first pattern matches. Earlier plugins, and a plugin with `-monitoring-mode=split`, offer a resource
for each kernel driver, which the second pattern matches."""
