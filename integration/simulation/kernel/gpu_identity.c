// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: gives QEMU's "edu" PCI devices the identity of an NVIDIA H100 before any driver or udev sees them.
 * Only the kernel's view changes (sysfs, uevents, driver matching); the configuration space keeps QEMU's ids.
 */
#include <linux/device.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/pci.h>

#define EDU_VENDOR 0x1234 /* hw/misc/edu.c of QEMU */
#define EDU_DEVICE 0x11e8
#define H100_DEVICE 0x2330
#define H100_SUBSYSTEM 0x16c1

static void identify(struct pci_dev *pdev)
{
	if (pdev->vendor != EDU_VENDOR || pdev->device != EDU_DEVICE)
		return;
	pdev->vendor = PCI_VENDOR_ID_NVIDIA;
	pdev->device = H100_DEVICE;
	pdev->subsystem_vendor = PCI_VENDOR_ID_NVIDIA;
	pdev->subsystem_device = H100_SUBSYSTEM;
	pdev->class = PCI_CLASS_DISPLAY_3D << 8;
	pdev->revision = 0xa1;
	pci_info(pdev, "gpu_identity (simulation): edu device presented as 10de:2330\n");
}

/* BUS_NOTIFY_ADD_DEVICE comes before the add uevent and before the bus is probed (device_add in drivers/base/core.c). */
static int on_bus_event(struct notifier_block *block, unsigned long event, void *data)
{
	if (event == BUS_NOTIFY_ADD_DEVICE)
		identify(to_pci_dev(data));
	return NOTIFY_DONE;
}

static struct notifier_block bus_events = { .notifier_call = on_bus_event };

static int __init gpu_identity_init(void)
{
	struct pci_dev *pdev = NULL;
	int error = bus_register_notifier(&pci_bus_type, &bus_events);

	if (error)
		return error;
	for_each_pci_dev(pdev)
		identify(pdev);
	return 0;
}

static void __exit gpu_identity_exit(void)
{
	bus_unregister_notifier(&pci_bus_type, &bus_events);
}

module_init(gpu_identity_init);
module_exit(gpu_identity_exit);
MODULE_DESCRIPTION("Simulation: presents QEMU edu devices as NVIDIA H100 GPUs");
MODULE_LICENSE("Dual MIT/GPL");
