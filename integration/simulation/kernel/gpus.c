// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: stand-in for NVIDIA's nvidia.ko. This file: the PCI driver, GPU minors and module entry.
 * It drives no hardware; it shows user space what the real driver shows.
 */
#include <linux/bitmap.h>
#include <linux/delay.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>

#include "nvidia.h"

static LIST_HEAD(gpus);
static DEFINE_MUTEX(gpus_lock);
static DECLARE_BITMAP(minors, NVIDIA_GPU_MINORS);
static BLOCKING_NOTIFIER_HEAD(listeners);

static struct nvidia_gpu *find(unsigned int minor)
{
	struct nvidia_gpu *gpu;

	list_for_each_entry(gpu, &gpus, list)
		if (gpu->minor == minor)
			return gpu;
	return NULL;
}

void nvidia_gpu_log_xid(unsigned int minor, unsigned int xid, const char *text)
{
	struct nvidia_gpu *gpu;

	mutex_lock(&gpus_lock);
	gpu = find(minor);
	if (gpu)
		pr_err("NVRM: Xid (PCI:%04x:%02x:%02x): %u, %s\n", pci_domain_nr(gpu->pdev->bus),
		       gpu->pdev->bus->number, PCI_SLOT(gpu->pdev->devfn), xid, text);
	mutex_unlock(&gpus_lock);
}

/*
 * "MINOR XID", written by a person or a test: an error of that GPU. It goes to the kernel log as with the real driver
 * (nvErrorLog_va of open-gpu-kernel-modules), and the stand-in NVML reports it as an event.
 */
static char simulated_xid[32];

static int raise_xid(const char *value, const struct kernel_param *parameter)
{
	unsigned int minor, xid;
	int error = param_set_copystring(value, parameter);

	if (!error && sscanf(simulated_xid, "%u %u", &minor, &xid) == 2)
		nvidia_gpu_log_xid(minor, xid, "pid='<unknown>', name=<unknown>, simulated");
	return error;
}

static const struct kernel_param_ops xid_ops = { .set = raise_xid, .get = param_get_string };
static struct kparam_string xid_string = { .maxlen = sizeof(simulated_xid), .string = simulated_xid };
module_param_cb(simulated_xid, &xid_ops, &xid_string, 0644);

int nvidia_gpu_open(unsigned int minor)
{
	struct nvidia_gpu *gpu;

	mutex_lock(&gpus_lock);
	gpu = find(minor);
	if (gpu && gpu->removing)
		gpu = NULL;
	if (gpu) {
		gpu->opens++;
		gpu->initialised = true;
	}
	mutex_unlock(&gpus_lock);
	return gpu ? 0 : -ENODEV;
}

void nvidia_gpu_release(unsigned int minor)
{
	struct nvidia_gpu *gpu;

	mutex_lock(&gpus_lock);
	gpu = find(minor);
	if (gpu)
		gpu->opens--;
	mutex_unlock(&gpus_lock);
}

void nvidia_gpu_show_opens(struct seq_file *file)
{
	const struct nvidia_gpu *gpu;

	mutex_lock(&gpus_lock);
	list_for_each_entry(gpu, &gpus, list)
		seq_printf(file, "%u opens %u\n", gpu->minor, gpu->opens);
	mutex_unlock(&gpus_lock);
}

int nvidia_gpu_notify(struct notifier_block *block)
{
	struct nvidia_gpu *gpu;
	int error;

	mutex_lock(&gpus_lock);
	error = blocking_notifier_chain_register(&listeners, block);
	if (!error)
		list_for_each_entry(gpu, &gpus, list)
			block->notifier_call(block, NVIDIA_GPU_ADDED, gpu->pdev);
	mutex_unlock(&gpus_lock);
	return error;
}
EXPORT_SYMBOL(nvidia_gpu_notify);

void nvidia_gpu_unnotify(struct notifier_block *block)
{
	blocking_notifier_chain_unregister(&listeners, block);
}
EXPORT_SYMBOL(nvidia_gpu_unnotify);

/* The minor is the lowest free one at probe and is freed at unbind, as in nvidia_probe of nv-pci.c. */
static int probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct nvidia_gpu *gpu = kzalloc(sizeof(*gpu), GFP_KERNEL);
	int error;

	if (!gpu)
		return -ENOMEM;
	error = pci_enable_device(pdev);
	if (error) {
		kfree(gpu);
		return error;
	}
	gpu->pdev = pdev;
	mutex_lock(&gpus_lock);
	gpu->minor = find_first_zero_bit(minors, NVIDIA_GPU_MINORS);
	if (gpu->minor >= NVIDIA_GPU_MINORS) {
		mutex_unlock(&gpus_lock);
		pci_disable_device(pdev);
		kfree(gpu);
		return -ENOSPC;
	}
	set_bit(gpu->minor, minors);
	list_add_tail(&gpu->list, &gpus);
	pci_set_drvdata(pdev, gpu);
	nvidia_procfs_add_gpu(gpu);
	nvidia_mig_add_gpu(gpu->minor);
	blocking_notifier_call_chain(&listeners, NVIDIA_GPU_ADDED, pdev);
	mutex_unlock(&gpus_lock);
	return 0;
}

/* The real driver waits here too until the last descriptor is closed (nv_pci_remove_helper of nv-pci.c). */
static void wait_until_closed(struct nvidia_gpu *gpu)
{
	mutex_lock(&gpus_lock);
	gpu->removing = true;
	mutex_unlock(&gpus_lock);
	if (!READ_ONCE(gpu->opens))
		return;
	pci_err(gpu->pdev, "NVRM: Attempting to remove device with non-zero usage count!\n");
	while (READ_ONCE(gpu->opens))
		msleep(50);
	pci_err(gpu->pdev, "NVRM: Continuing with GPU removal\n");
}

static void remove(struct pci_dev *pdev)
{
	struct nvidia_gpu *gpu = pci_get_drvdata(pdev);

	wait_until_closed(gpu);
	/* Outside the lock: a value that is set takes its own lock first, then this one, to log an Xid. */
	nvidia_health_remove_gpu(gpu->minor);
	mutex_lock(&gpus_lock);
	blocking_notifier_call_chain(&listeners, NVIDIA_GPU_REMOVED, pdev);
	nvidia_mig_remove_gpu(gpu->minor);
	nvidia_procfs_remove_gpu(gpu);
	list_del(&gpu->list);
	clear_bit(gpu->minor, minors);
	mutex_unlock(&gpus_lock);
	pci_disable_device(pdev);
	kfree(gpu);
}

static const struct pci_device_id ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_VGA << 8, .class_mask = ~0U },
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_3D << 8, .class_mask = ~0U },
	{ }
};

static struct pci_driver driver = { .name = "nvidia", .id_table = ids, .probe = probe, .remove = remove };

/* Procfs comes before the PCI driver, which fills it; the character devices come last, as in the real module. */
static int __init nvidia_init(void)
{
	int error = nvidia_procfs_register();

	if (error)
		return error;
	error = nvidia_capabilities_register();
	if (error)
		goto procfs;
	error = pci_register_driver(&driver);
	if (error)
		goto capabilities;
	error = nvidia_chardev_register();
	if (error)
		goto pci;
	pr_info("NVRM: loading the simulated NVIDIA kernel module %s\n", NVIDIA_VERSION);
	return 0;
pci:
	pci_unregister_driver(&driver);
capabilities:
	nvidia_capabilities_unregister();
procfs:
	nvidia_procfs_unregister();
	return error;
}

static void __exit nvidia_exit(void)
{
	nvidia_chardev_unregister();
	pci_unregister_driver(&driver);
	nvidia_capabilities_unregister();
	nvidia_procfs_unregister();
}

module_init(nvidia_init);
module_exit(nvidia_exit);
MODULE_DEVICE_TABLE(pci, ids);
MODULE_DESCRIPTION("Simulation: stand-in for NVIDIA's kernel module");
MODULE_VERSION(NVIDIA_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
