// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: MIG and IMEX capabilities of the stand-in nvidia.ko: /proc/driver/nvidia/capabilities,
 * /proc/driver/nvidia-caps, and the majors nvidia-caps and nvidia-caps-imex-channels (nv-caps.c, nv-caps-imex.c).
 */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/seq_file.h>

#include "nvidia.h"

#define CAP_MINORS 8192
#define CONFIG_MINOR 1
#define MONITOR_MINOR 2
/* The numbers run through every possible GPU, GPU instance and compute instance; this one is 4323, as on real hosts. */
#define FABRIC_IMEX_MINOR (3 + NVIDIA_MIG_GPUS * NVIDIA_MIG_GIS * (1 + NVIDIA_MIG_CIS))

/* Older branches have no IMEX channels. */
static unsigned int imex_channels = NVIDIA_BRANCH >= 550 ? 2048 : 0;
module_param_named(NVreg_ImexChannelCount, imex_channels, uint, 0444);
MODULE_PARM_DESC(NVreg_ImexChannelCount, "IMEX channels; 0: no major nvidia-caps-imex-channels");

unsigned int nvidia_imex_channels(void)
{
	return imex_channels;
}

static struct proc_dir_entry *capabilities, *minors;
static dev_t caps_first, imex_first;
static struct cdev caps_cdev, imex_cdev;

static const struct nvidia_capability config = { CONFIG_MINOR, 0400 };
static const struct nvidia_capability monitor = { MONITOR_MINOR, 0444 };
static const struct nvidia_capability fabric_imex = { FABRIC_IMEX_MINOR, 0400 };

static int show_capability(struct seq_file *file, void *data)
{
	const struct nvidia_capability *capability = file->private;

	seq_printf(file, "DeviceFileMinor: %u\nDeviceFileMode: %u\nDeviceFileModify: 1\n", capability->minor,
		   capability->mode);
	return 0;
}

static int show_mig_minors(struct seq_file *file, void *data)
{
	int gpu, gi, ci;

	seq_printf(file, "config %u\nmonitor %u\n", CONFIG_MINOR, MONITOR_MINOR);
	for (gpu = 0; gpu < NVIDIA_MIG_GPUS; gpu++)
		for (gi = 0; gi < NVIDIA_MIG_GIS; gi++) {
			seq_printf(file, "gpu%d/gi%d/access %u\n", gpu, gi, nvidia_gi_minor(gpu, gi));
			for (ci = 0; ci < NVIDIA_MIG_CIS; ci++)
				seq_printf(file, "gpu%d/gi%d/ci%d/access %u\n", gpu, gi, ci,
					   nvidia_ci_minor(gpu, gi, ci));
		}
	return 0;
}

static int show_sys_minors(struct seq_file *file, void *data)
{
	seq_printf(file, "fabric-imex-mgmt %u\n", FABRIC_IMEX_MINOR);
	return 0;
}

/* As in the real driver, every minor opens, even without an instance (nv_cap_drv_open): the node is the permission. */
static int open(struct inode *inode, struct file *file)
{
	return 0;
}

static const struct file_operations operations = { .owner = THIS_MODULE, .open = open };

static int add_region(dev_t *first, struct cdev *cdev, unsigned int count, const char *name)
{
	int error = alloc_chrdev_region(first, 0, count, name);

	if (error)
		return error;
	cdev_init(cdev, &operations);
	error = cdev_add(cdev, *first, count);
	if (error)
		unregister_chrdev_region(*first, count);
	return error;
}

static void remove_region(dev_t first, struct cdev *cdev, unsigned int count)
{
	cdev_del(cdev);
	unregister_chrdev_region(first, count);
}

struct proc_dir_entry *nvidia_capability_file(const char *name, struct proc_dir_entry *parent,
					      const struct nvidia_capability *capability)
{
	return proc_create_single_data(name, 0444, parent, show_capability, (void *)capability);
}

struct proc_dir_entry *nvidia_capabilities_directory(void)
{
	return capabilities;
}

static int add_files(void)
{
	struct proc_dir_entry *mig;

	capabilities = proc_mkdir("driver/nvidia/capabilities", NULL);
	minors = proc_mkdir("driver/nvidia-caps", NULL);
	if (!capabilities || !minors)
		return -ENOMEM;
	mig = proc_mkdir("mig", capabilities);
	if (!mig || !nvidia_capability_file("config", mig, &config) ||
	    !nvidia_capability_file("monitor", mig, &monitor) ||
	    !nvidia_capability_file("fabric-imex-mgmt", capabilities, &fabric_imex) ||
	    !proc_create_single("mig-minors", 0444, minors, show_mig_minors) ||
	    !proc_create_single("sys-minors", 0444, minors, show_sys_minors))
		return -ENOMEM;
	return 0;
}

int nvidia_capabilities_register(void)
{
	int error = add_files();

	if (error)
		goto files;
	error = add_region(&caps_first, &caps_cdev, CAP_MINORS, "nvidia-caps");
	if (error)
		goto files;
	if (!imex_channels)
		return 0;
	error = add_region(&imex_first, &imex_cdev, imex_channels, "nvidia-caps-imex-channels");
	if (!error)
		return 0;
	remove_region(caps_first, &caps_cdev, CAP_MINORS);
files:
	proc_remove(minors);
	proc_remove(capabilities);
	return error;
}

void nvidia_capabilities_unregister(void)
{
	if (imex_channels)
		remove_region(imex_first, &imex_cdev, imex_channels);
	remove_region(caps_first, &caps_cdev, CAP_MINORS);
	proc_remove(minors);
	proc_remove(capabilities);
}
