// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Simulation: stand-in for NVIDIA's nvidia-uvm.ko: a dynamic major with minors 0 (uvm) and 1 (tools). */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

#include "nvidia.h"

#define UVM_MINORS 2

static dev_t first;
static struct cdev cdev;

/* Does nothing, but makes this module depend on nvidia.ko, as the real one does by the symbols that it uses. */
static struct notifier_block gpu_events;

static int on_gpu(struct notifier_block *block, unsigned long event, void *pdev)
{
	return NOTIFY_DONE;
}

static int open(struct inode *inode, struct file *file)
{
	return 0;
}

static const struct file_operations operations = { .owner = THIS_MODULE, .open = open };

static int __init uvm_init(void)
{
	int error = alloc_chrdev_region(&first, 0, UVM_MINORS, "nvidia-uvm");

	if (error)
		return error;
	cdev_init(&cdev, &operations);
	error = cdev_add(&cdev, first, UVM_MINORS);
	if (error)
		goto region;
	gpu_events.notifier_call = on_gpu;
	error = nvidia_gpu_notify(&gpu_events);
	if (!error)
		return 0;
	cdev_del(&cdev);
region:
	unregister_chrdev_region(first, UVM_MINORS);
	return error;
}

static void __exit uvm_exit(void)
{
	nvidia_gpu_unnotify(&gpu_events);
	cdev_del(&cdev);
	unregister_chrdev_region(first, UVM_MINORS);
}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_DESCRIPTION("Simulation: stand-in for NVIDIA's nvidia-uvm");
MODULE_VERSION(NVIDIA_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
