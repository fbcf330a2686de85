// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: stand-in for NVIDIA's nvidia-drm.ko with modeset=0: one real DRM device per bound GPU, features
 * GEM and RENDER, so that /dev/dri/cardN and renderDN exist with the PCI device as their parent.
 */
#include <drm/drm_drv.h>
#include <drm/drm_file.h>
#include <drm/drm_gem.h>
#include <drm/drm_ioctl.h>
#include <linux/module.h>

#include "nvidia.h"

int nvKmsKapiGetFunctionTable(void);

struct gpu_drm {
	struct list_head list;
	struct drm_device *device;
};

/* nvidia.ko calls its notifiers under its own lock, which guards this list too. */
static LIST_HEAD(devices);

DEFINE_DRM_GEM_FOPS(file_operations);

static const struct drm_driver driver = {
	.driver_features = DRIVER_GEM | DRIVER_RENDER,
	.fops = &file_operations,
	.name = "nvidia-drm",
	.desc = "Simulation: NVIDIA DRM driver",
	.date = "20160202",
};

static int add(struct pci_dev *pdev)
{
	struct gpu_drm *gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);
	int error;

	if (!gpu)
		return -ENOMEM;
	gpu->device = drm_dev_alloc(&driver, &pdev->dev);
	if (IS_ERR(gpu->device)) {
		error = PTR_ERR(gpu->device);
		kfree(gpu);
		return error;
	}
	error = drm_dev_register(gpu->device, 0);
	if (error) {
		drm_dev_put(gpu->device);
		kfree(gpu);
		return error;
	}
	list_add_tail(&gpu->list, &devices);
	return 0;
}

static void drop(struct gpu_drm *gpu)
{
	list_del(&gpu->list);
	drm_dev_unplug(gpu->device);
	drm_dev_put(gpu->device);
	kfree(gpu);
}

static int on_gpu(struct notifier_block *block, unsigned long event, void *data)
{
	struct pci_dev *pdev = data;
	struct gpu_drm *gpu, *next;
	int error;

	if (event == NVIDIA_GPU_ADDED) {
		error = add(pdev);
		if (error)
			pci_err(pdev, "nvidia-drm (simulation): cannot register a DRM device: %d\n", error);
		return NOTIFY_DONE;
	}
	list_for_each_entry_safe(gpu, next, &devices, list)
		if (gpu->device->dev == &pdev->dev)
			drop(gpu);
	return NOTIFY_DONE;
}

static struct notifier_block gpu_events = { .notifier_call = on_gpu };

static int __init nvidia_drm_init(void)
{
	return nvKmsKapiGetFunctionTable() ? nvidia_gpu_notify(&gpu_events) : -ENODEV;
}

static void __exit nvidia_drm_exit(void)
{
	struct gpu_drm *gpu, *next;

	nvidia_gpu_unnotify(&gpu_events);
	list_for_each_entry_safe(gpu, next, &devices, list)
		drop(gpu);
}

module_init(nvidia_drm_init);
module_exit(nvidia_drm_exit);
MODULE_DESCRIPTION("Simulation: stand-in for NVIDIA's nvidia-drm");
MODULE_VERSION(NVIDIA_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
