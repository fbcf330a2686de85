// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: the character devices of the stand-in nvidia.ko. As with the real driver there is no device class:
 * no sysfs device, no devtmpfs node, no uevent. User space makes the nodes.
 */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

#include "nvidia.h"

static bool modeset_loaded;

void nvidia_modeset_present(bool present)
{
	WRITE_ONCE(modeset_loaded, present);
}
EXPORT_SYMBOL(nvidia_modeset_present);

static int open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);

	if (minor == NVIDIA_CTL_MINOR)
		return 0;
	if (minor == NVIDIA_MODESET_MINOR)
		return READ_ONCE(modeset_loaded) ? 0 : -ENODEV;
	return nvidia_gpu_open(minor);
}

static int release(struct inode *inode, struct file *file)
{
	if (iminor(inode) < NVIDIA_GPU_MINORS)
		nvidia_gpu_release(iminor(inode));
	return 0;
}

static const struct file_operations operations = { .owner = THIS_MODULE, .open = open, .release = release };

struct region {
	struct cdev cdev;
	unsigned int first;
	unsigned int count;
	const char *name;
};

/* Since driver 545, GPUs and nvidiactl have their own names in /proc/devices. Before, one front end had all minors. */
static struct region regions[] = {
#if NVIDIA_BRANCH >= 545
	{ .first = 0, .count = NVIDIA_GPU_MINORS, .name = "nvidia" },
	{ .first = NVIDIA_CTL_MINOR, .count = 1, .name = "nvidiactl" },
#else
	{ .first = 0, .count = 256, .name = "nvidia-frontend" },
#endif
};

static void unregister(struct region *region)
{
	cdev_del(&region->cdev);
	unregister_chrdev_region(MKDEV(NVIDIA_MAJOR, region->first), region->count);
}

int nvidia_chardev_register(void)
{
	int done, error;

	for (done = 0; done < ARRAY_SIZE(regions); done++) {
		struct region *region = &regions[done];
		dev_t first = MKDEV(NVIDIA_MAJOR, region->first);

		error = register_chrdev_region(first, region->count, region->name);
		if (error)
			goto undo;
		cdev_init(&region->cdev, &operations);
		error = cdev_add(&region->cdev, first, region->count);
		if (error) {
			unregister_chrdev_region(first, region->count);
			goto undo;
		}
	}
	return 0;
undo:
	while (done--)
		unregister(&regions[done]);
	return error;
}

void nvidia_chardev_unregister(void)
{
	int index = ARRAY_SIZE(regions);

	while (index--)
		unregister(&regions[index]);
}
