// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: presents QEMU's "pci-testdev" devices as GPUs of other vendors, with real DRM devices. Its PCI drivers
 * have the names of the real ones. They drive no hardware; user space sees the nodes, attributes and uevents of a GPU.
 * The parameter next_vendor is the PCI vendor of devices that are added after it is set. A write of `ADDRESS TEXT` to
 * simulated_fault lets the driver of that GPU write the text to the kernel log, as dev_err does; if the text begins with
 * WEDGED=, the driver sends this uevent, as drm_dev_wedged_event does. With - for the address, the text is all of the line.
 */
#include <drm/drm_drv.h>
#include <drm/drm_file.h>
#include <drm/drm_gem.h>
#include <drm/drm_ioctl.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/pci.h>

#define TESTDEV_VENDOR 0x1b36 /* hw/misc/pci-testdev.c of QEMU */
#define TESTDEV_DEVICE 0x0005
#define ASPEED_VENDOR 0x1a03
#define STAND_IN_DEVICE 0xfffe /* no vendor uses it: the real drivers' aliases do not match it */

static ushort next_vendor = PCI_VENDOR_ID_INTEL;
module_param(next_vendor, ushort, 0644);
MODULE_PARM_DESC(next_vendor, "PCI vendor of the pci-testdev devices that come from now on");

/*
 * Runs before the add uevent, and before the bus is probed (device_add in drivers/base/core.c). AMD's GPU is a 3D
 * controller, because the real amdgpu takes every VGA controller of AMD's.
 */
static int on_bus_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct pci_dev *pdev = to_pci_dev(data);

	if (event != BUS_NOTIFY_ADD_DEVICE || pdev->vendor != TESTDEV_VENDOR || pdev->device != TESTDEV_DEVICE)
		return NOTIFY_DONE;
	pdev->vendor = next_vendor;
	pdev->device = STAND_IN_DEVICE;
	pdev->class = (next_vendor == PCI_VENDOR_ID_ATI ? PCI_CLASS_DISPLAY_3D : PCI_CLASS_DISPLAY_VGA) << 8;
	pci_info(pdev, "simulated_drm: pci-testdev presented as %04x:%04x\n", pdev->vendor, pdev->device);
	return NOTIFY_DONE;
}

static struct notifier_block bus_events = { .notifier_call = on_bus_event };

DEFINE_DRM_GEM_FOPS(drm_file_operations);

#define STAND_IN(driver_name, driver_features_) \
	{ .driver_features = (driver_features_), .fops = &drm_file_operations, .name = driver_name, \
	  .desc = "Simulation", .date = "20240101" }

static const struct drm_driver i915 = STAND_IN("i915", DRIVER_GEM | DRIVER_RENDER);
static const struct drm_driver amdgpu = STAND_IN("amdgpu", DRIVER_GEM | DRIVER_RENDER);
/* A management controller's display renders nothing. */
static const struct drm_driver ast = STAND_IN("ast", DRIVER_GEM);

static int probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct drm_device *drm = drm_dev_alloc((const struct drm_driver *)id->driver_data, &pdev->dev);
	int error;

	if (IS_ERR(drm))
		return PTR_ERR(drm);
	error = drm_dev_register(drm, 0);
	if (error) {
		drm_dev_put(drm);
		return error;
	}
	pci_set_drvdata(pdev, drm);
	return 0;
}

static void remove(struct pci_dev *pdev)
{
	struct drm_device *drm = pci_get_drvdata(pdev);

	drm_dev_unplug(drm);
	drm_dev_put(drm);
}

#define IDS(vendor_id, drm) \
	{ { PCI_DEVICE(vendor_id, STAND_IN_DEVICE), .driver_data = (kernel_ulong_t)&(drm) }, { } }

static const struct pci_device_id intel_ids[] = IDS(PCI_VENDOR_ID_INTEL, i915);
static const struct pci_device_id amd_ids[] = IDS(PCI_VENDOR_ID_ATI, amdgpu);
static const struct pci_device_id bmc_ids[] = IDS(ASPEED_VENDOR, ast);

static struct pci_driver drivers[] = {
	{ .name = "i915", .id_table = intel_ids, .probe = probe, .remove = remove },
	{ .name = "amdgpu", .id_table = amd_ids, .probe = probe, .remove = remove },
	{ .name = "ast", .id_table = bmc_ids, .probe = probe, .remove = remove },
};

/* Like kfd_chardev.c: one node, with a dynamic major and its own class. */
static const struct file_operations kfd_operations = { .owner = THIS_MODULE, .open = nonseekable_open };
static const struct class kfd_class = { .name = "kfd" };
static int kfd_major;

static int __init kfd_register(void)
{
	struct device *device;
	int error = class_register(&kfd_class);

	if (error)
		return error;
	kfd_major = register_chrdev(0, "kfd", &kfd_operations);
	if (kfd_major < 0) {
		class_unregister(&kfd_class);
		return kfd_major;
	}
	device = device_create(&kfd_class, NULL, MKDEV(kfd_major, 0), NULL, "kfd");
	return PTR_ERR_OR_ZERO(device);
}

static int raise_fault(const char *value, const struct kernel_param *parameter)
{
	char address[16], text[200], *event[] = { text, NULL };
	struct device *device;
	struct drm_device *drm;
	int error = 0;

	if (sscanf(value, "%15s %199[^\n]", address, text) != 2)
		return -EINVAL;
	if (!strcmp(address, "-")) {
		printk(KERN_ERR "%s\n", text);
		return 0;
	}
	device = bus_find_device_by_name(&pci_bus_type, NULL, address);
	if (!device)
		return -ENODEV;
	drm = to_pci_dev(device)->device == STAND_IN_DEVICE ? dev_get_drvdata(device) : NULL;
	if (!drm)
		error = -ENODEV;
	else if (strncmp(text, "WEDGED=", strlen("WEDGED=")))
		dev_err(device, "%s\n", text);
	else
		error = kobject_uevent_env(&drm->primary->kdev->kobj, KOBJ_CHANGE, event);
	put_device(device);
	return error;
}

static const struct kernel_param_ops fault_operations = { .set = raise_fault };
module_param_cb(simulated_fault, &fault_operations, NULL, 0200);
MODULE_PARM_DESC(simulated_fault, "ADDRESS TEXT: an error of a GPU, in the kernel log or as a uevent");

/* The module cannot be unloaded: the virtual machine ends with its test. */
static int __init simulated_drm_init(void)
{
	int index, error = kfd_register();

	for (index = 0; !error && index < ARRAY_SIZE(drivers); index++)
		error = pci_register_driver(&drivers[index]);
	return error ? error : bus_register_notifier(&pci_bus_type, &bus_events);
}

module_init(simulated_drm_init);
MODULE_DESCRIPTION("Simulation: QEMU pci-testdev devices as GPUs of Intel and AMD");
MODULE_LICENSE("Dual MIT/GPL");
