// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: devices other than GPUs that need hardware or a driver outside the kernel. They have the names of their
 * real drivers. GDRCopy and NVSwitch have no device class, so user space makes their nodes; GPUDirect Storage has one.
 * An NPU uses the kernel's own accel subsystem. The nodes can be opened, but there is nothing behind them.
 */
#include <drm/drm_accel.h>
#include <drm/drm_drv.h>
#include <drm/drm_file.h>
#include <drm/drm_gem.h>
#include <drm/drm_ioctl.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/platform_device.h>

#define NVIDIA_FS_DEVICES 2

static const struct file_operations operations = { .owner = THIS_MODULE, .open = nonseekable_open };
static const char *const names[] = { "gdrdrv", "nvidia-nvswitch", "nvidia-fs" };
static int majors[ARRAY_SIZE(names)];

static char *nvidia_fs_node(const struct device *device, umode_t *mode)
{
	if (mode)
		*mode = 0666;
	return NULL;
}

static const struct class nvidia_fs_class = { .name = "nvidia-fs-class", .devnode = nvidia_fs_node };

DEFINE_DRM_ACCEL_FOPS(accel_operations);

static const struct drm_driver npu_driver = {
	.driver_features = DRIVER_GEM | DRIVER_COMPUTE_ACCEL,
	.fops = &accel_operations,
	.name = "simulated_npu",
	.desc = "Simulation",
	.date = "20240101",
};
static struct platform_device *npu;
static struct drm_device *npu_drm;

static void unregister_majors(int count)
{
	while (count--)
		unregister_chrdev(majors[count], names[count]);
}

static int register_majors(void)
{
	int index;

	for (index = 0; index < ARRAY_SIZE(names); index++) {
		majors[index] = register_chrdev(0, names[index], &operations);
		if (majors[index] < 0) {
			unregister_majors(index);
			return majors[index];
		}
	}
	return 0;
}

static int register_npu(void)
{
	int error;

	npu = platform_device_register_simple("simulated_npu", PLATFORM_DEVID_NONE, NULL, 0);
	if (IS_ERR(npu))
		return PTR_ERR(npu);
	npu_drm = drm_dev_alloc(&npu_driver, &npu->dev);
	error = PTR_ERR_OR_ZERO(npu_drm);
	if (!error) {
		error = drm_dev_register(npu_drm, 0);
		if (error)
			drm_dev_put(npu_drm);
	}
	if (error)
		platform_device_unregister(npu);
	return error;
}

static int __init simulated_devices_init(void)
{
	int index, error = register_majors();

	if (error)
		return error;
	error = class_register(&nvidia_fs_class);
	if (error)
		goto without_class;
	error = register_npu();
	if (error)
		goto without_npu;
	for (index = 0; index < NVIDIA_FS_DEVICES; index++)
		device_create(&nvidia_fs_class, NULL, MKDEV(majors[2], index), NULL, "nvidia-fs%d", index);
	return 0;
without_npu:
	class_unregister(&nvidia_fs_class);
without_class:
	unregister_majors(ARRAY_SIZE(names));
	return error;
}

static void __exit simulated_devices_exit(void)
{
	int index;

	for (index = 0; index < NVIDIA_FS_DEVICES; index++)
		device_destroy(&nvidia_fs_class, MKDEV(majors[2], index));
	drm_dev_unregister(npu_drm);
	drm_dev_put(npu_drm);
	platform_device_unregister(npu);
	class_unregister(&nvidia_fs_class);
	unregister_majors(ARRAY_SIZE(names));
}

module_init(simulated_devices_init);
module_exit(simulated_devices_exit);
MODULE_DESCRIPTION("Simulation: GDRCopy, NVSwitch, GPUDirect Storage and an NPU");
MODULE_LICENSE("Dual MIT/GPL");
