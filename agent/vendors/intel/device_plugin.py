"""Names that Intel's Kubernetes device plugin gives to resources (cmd/gpu_plugin). Pure."""

RESOURCE_PREFIX = "gpu.intel.com/"
"""The resources are `gpu.intel.com/i915` and `gpu.intel.com/xe`, named after the kernel driver."""
HARMLESS_RESOURCES = ("gpu.intel.com/monitoring", "gpu.intel.com/*_monitoring")
"""Resources with which a pod can monitor all GPUs. The plugin now offers one such resource, the first. Earlier plugins,
and a plugin with `-monitoring-mode=split`, offer one for each kernel driver; these match the second."""
