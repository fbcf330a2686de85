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
#define FIRST_GPU_MINOR 3
#define MAX_GPUS 32
#define MAX_GI 15
#define MAX_CI 8
/* The numbering runs on through every possible GPU, GPU instance and compute instance: 4323 on real machines too. */
#define FABRIC_IMEX_MINOR (FIRST_GPU_MINOR + MAX_GPUS * MAX_GI * (1 + MAX_CI))

static unsigned int imex_channels;
module_param_named(NVreg_ImexChannelCount, imex_channels, uint, 0444);
MODULE_PARM_DESC(NVreg_ImexChannelCount, "IMEX channels (real default 2048); 0: no major nvidia-caps-imex-channels");

unsigned int nvidia_imex_channels(void)
{
	return imex_channels;
}

static struct proc_dir_entry *capabilities, *minors;
static dev_t caps_first, imex_first;
static struct cdev caps_cdev, imex_cdev;

struct capability {
	unsigned int minor;
	unsigned int mode;
};

static const struct capability config = { CONFIG_MINOR, 0400 };
static const struct capability monitor = { MONITOR_MINOR, 0444 };
static const struct capability fabric_imex = { FABRIC_IMEX_MINOR, 0400 };

static int show_capability(struct seq_file *file, void *data)
{
	const struct capability *capability = file->private;

	seq_printf(file, "DeviceFileMinor: %u\nDeviceFileMode: %u\nDeviceFileModify: 1\n", capability->minor,
		   capability->mode);
	return 0;
}

static int show_mig_minors(struct seq_file *file, void *data)
{
	unsigned int gpu, gi, ci, minor = FIRST_GPU_MINOR;

	seq_printf(file, "config %u\nmonitor %u\n", CONFIG_MINOR, MONITOR_MINOR);
	for (gpu = 0; gpu < MAX_GPUS; gpu++)
		for (gi = 0; gi < MAX_GI; gi++) {
			seq_printf(file, "gpu%u/gi%u/access %u\n", gpu, gi, minor++);
			for (ci = 0; ci < MAX_CI; ci++)
				seq_printf(file, "gpu%u/gi%u/ci%u/access %u\n", gpu, gi, ci, minor++);
		}
	return 0;
}

static int show_sys_minors(struct seq_file *file, void *data)
{
	seq_printf(file, "fabric-imex-mgmt %u\n", FABRIC_IMEX_MINOR);
	return 0;
}

/* No MIG instance exists, so only the three capabilities that need none can be opened. */
static int open_capability(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);

	return minor == CONFIG_MINOR || minor == MONITOR_MINOR || minor == FABRIC_IMEX_MINOR ? 0 : -ENODEV;
}

static int open_channel(struct inode *inode, struct file *file)
{
	return 0;
}

static const struct file_operations capability_operations = { .owner = THIS_MODULE, .open = open_capability };
static const struct file_operations channel_operations = { .owner = THIS_MODULE, .open = open_channel };

static int add_region(dev_t *first, struct cdev *cdev, unsigned int count, const char *name,
		      const struct file_operations *operations)
{
	int error = alloc_chrdev_region(first, 0, count, name);

	if (error)
		return error;
	cdev_init(cdev, operations);
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

static void *single(const char *name, struct proc_dir_entry *parent, const struct capability *capability)
{
	return proc_create_single_data(name, 0444, parent, show_capability, (void *)capability);
}

static int add_files(void)
{
	struct proc_dir_entry *mig;

	capabilities = proc_mkdir("driver/nvidia/capabilities", NULL);
	minors = proc_mkdir("driver/nvidia-caps", NULL);
	if (!capabilities || !minors)
		return -ENOMEM;
	mig = proc_mkdir("mig", capabilities);
	if (!mig || !single("config", mig, &config) || !single("monitor", mig, &monitor) ||
	    !single("fabric-imex-mgmt", capabilities, &fabric_imex) ||
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
	error = add_region(&caps_first, &caps_cdev, CAP_MINORS, "nvidia-caps", &capability_operations);
	if (error)
		goto files;
	if (!imex_channels)
		return 0;
	error = add_region(&imex_first, &imex_cdev, imex_channels, "nvidia-caps-imex-channels", &channel_operations);
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
