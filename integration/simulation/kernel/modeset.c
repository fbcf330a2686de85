// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: stand-in for NVIDIA's nvidia-modeset.ko. Since driver 545, it registers minor 254 under its own
 * name. Before 545, nvidia.ko's front end owns the minor, and this module registers with it.
 */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

#include "nvidia.h"

/* nvidia-drm depends on this module, as the real one does through the same symbol. */
int nvKmsKapiGetFunctionTable(void);
int nvKmsKapiGetFunctionTable(void)
{
	return 1;
}
EXPORT_SYMBOL(nvKmsKapiGetFunctionTable);

#if NVIDIA_BRANCH >= 545
static struct cdev cdev;

static int open(struct inode *inode, struct file *file)
{
	return 0;
}

static const struct file_operations operations = { .owner = THIS_MODULE, .open = open };

static int add_node(void)
{
	int error = register_chrdev_region(MKDEV(NVIDIA_MAJOR, NVIDIA_MODESET_MINOR), 1, "nvidia-modeset");

	if (error)
		return error;
	cdev_init(&cdev, &operations);
	error = cdev_add(&cdev, MKDEV(NVIDIA_MAJOR, NVIDIA_MODESET_MINOR), 1);
	if (error)
		unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, NVIDIA_MODESET_MINOR), 1);
	return error;
}

static void remove_node(void)
{
	cdev_del(&cdev);
	unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, NVIDIA_MODESET_MINOR), 1);
}
#else
static int add_node(void)
{
	return 0;
}

static void remove_node(void)
{
}
#endif

static int __init modeset_init(void)
{
	int error = add_node();

	if (!error)
		nvidia_modeset_present(true);
	return error;
}

static void __exit modeset_exit(void)
{
	nvidia_modeset_present(false);
	remove_node();
}

module_init(modeset_init);
module_exit(modeset_exit);
MODULE_DESCRIPTION("Simulation: stand-in for NVIDIA's nvidia-modeset");
MODULE_VERSION(NVIDIA_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
