// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: MIG mode and MIG instances of the stand-in nvidia.ko. A person or a test makes and destroys them one step
 * at a time, as NVML does on a real host, by writing to /proc/driver/nvidia/simulated_mig, which the real driver lacks:
 *   enable MINOR               create-gi MINOR GI SLICES       destroy-ci MINOR GI CI
 *   disable MINOR              create-ci MINOR GI CI SLICES    destroy-gi MINOR GI
 * Reading it lists what exists, for the stand-in NVML. As with the real driver (osRmCapRegisterSmcPartition of os.c in
 * open-gpu-kernel-modules), an instance is a directory below /proc/driver/nvidia/capabilities, and user space makes its
 * node. Nothing checks here whether a GPU has enough slices.
 */
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "nvidia.h"

struct instance {
	struct nvidia_capability capability;
	struct proc_dir_entry *directory; /* NULL: no such instance */
	unsigned int slices;
};

struct mig {
	struct proc_dir_entry *gpu, *directory;
	bool enabled;
	struct instance gi[NVIDIA_MIG_GIS], ci[NVIDIA_MIG_GIS][NVIDIA_MIG_CIS];
};

static struct mig *migs[NVIDIA_MIG_GPUS];
static DEFINE_MUTEX(migs_lock);

static int create(struct instance *instance, struct proc_dir_entry *parent, const char *kind, unsigned int id,
		  unsigned int minor, unsigned int slices)
{
	char name[16];

	if (!parent)
		return -ENOENT;
	if (instance->directory)
		return -EEXIST;
	if (!slices)
		return -EINVAL;
	snprintf(name, sizeof(name), "%s%u", kind, id);
	instance->capability = (struct nvidia_capability){ minor, 0444 };
	instance->slices = slices;
	instance->directory = proc_mkdir(name, parent);
	if (!instance->directory || !nvidia_capability_file("access", instance->directory, &instance->capability))
		return -ENOMEM;
	return 0;
}

static int destroy(struct instance *instance)
{
	if (!instance->directory)
		return -ENOENT;
	proc_remove(instance->directory);
	instance->directory = NULL;
	return 0;
}

static bool has_instances(const struct instance *instances, unsigned int count)
{
	while (count--)
		if (instances[count].directory)
			return true;
	return false;
}

static int change(struct mig *mig, const char *verb, unsigned int gpu, unsigned int gi, unsigned int ci,
		  unsigned int last)
{
	struct instance *of_gi = &mig->gi[gi], *of_ci = &mig->ci[gi][ci];

	if (!strcmp(verb, "enable") || !strcmp(verb, "disable")) {
		if (has_instances(mig->gi, NVIDIA_MIG_GIS))
			return -EBUSY;
		mig->enabled = verb[0] == 'e';
		return 0;
	}
	if (!mig->enabled)
		return -EPERM;
	if (!strcmp(verb, "create-gi"))
		return create(of_gi, mig->directory, "gi", gi, nvidia_gi_minor(gpu, gi), last);
	if (!strcmp(verb, "create-ci"))
		return create(of_ci, of_gi->directory, "ci", ci, nvidia_ci_minor(gpu, gi, ci), last);
	if (!strcmp(verb, "destroy-ci"))
		return destroy(of_ci);
	if (!strcmp(verb, "destroy-gi"))
		return has_instances(mig->ci[gi], NVIDIA_MIG_CIS) ? -EBUSY : destroy(of_gi);
	return -EINVAL;
}

/* create-gi has SLICES where the other verbs have CI: it needs no CI. */
static int step(const char *words)
{
	unsigned int gpu, gi = 0, ci = 0, slices = 0;
	char verb[16];
	int error = -ENODEV;

	if (sscanf(words, "%15s %u %u %u %u", verb, &gpu, &gi, &ci, &slices) < 2)
		return -EINVAL;
	if (!strcmp(verb, "create-gi")) {
		slices = ci;
		ci = 0;
	}
	if (gpu >= NVIDIA_MIG_GPUS || gi >= NVIDIA_MIG_GIS || ci >= NVIDIA_MIG_CIS)
		return -EINVAL;
	mutex_lock(&migs_lock);
	if (migs[gpu])
		error = change(migs[gpu], verb, gpu, gi, ci, slices);
	mutex_unlock(&migs_lock);
	return error;
}

static ssize_t write(struct file *file, const char __user *buffer, size_t count, loff_t *position)
{
	char words[64] = "";
	int error;

	if (count >= sizeof(words))
		return -EINVAL;
	if (copy_from_user(words, buffer, count))
		return -EFAULT;
	error = step(words);
	return error ? error : count;
}

/* Lines: `gpu MINOR` in MIG mode, `gi MINOR GI SLICES`, `ci MINOR GI CI SLICES`. */
static int show(struct seq_file *file, void *data)
{
	int gpu, gi, ci;

	mutex_lock(&migs_lock);
	for (gpu = 0; gpu < NVIDIA_MIG_GPUS; gpu++) {
		const struct mig *mig = migs[gpu];

		if (!mig || !mig->enabled)
			continue;
		seq_printf(file, "gpu %d\n", gpu);
		for (gi = 0; gi < NVIDIA_MIG_GIS; gi++) {
			if (!mig->gi[gi].directory)
				continue;
			seq_printf(file, "gi %d %d %u\n", gpu, gi, mig->gi[gi].slices);
			for (ci = 0; ci < NVIDIA_MIG_CIS; ci++)
				if (mig->ci[gi][ci].directory)
					seq_printf(file, "ci %d %d %d %u\n", gpu, gi, ci, mig->ci[gi][ci].slices);
		}
	}
	mutex_unlock(&migs_lock);
	return 0;
}

static int open(struct inode *inode, struct file *file)
{
	return single_open(file, show, NULL);
}

static const struct proc_ops operations = {
	.proc_open = open,
	.proc_read = seq_read,
	.proc_lseek = seq_lseek,
	.proc_release = single_release,
	.proc_write = write,
};

struct proc_dir_entry *nvidia_mig_file(struct proc_dir_entry *parent)
{
	return proc_create("simulated_mig", 0644, parent, &operations);
}

/* The real driver makes gpuN/mig for every GPU, whether or not MIG mode is on (osRmCapRegisterGpu). */
void nvidia_mig_add_gpu(unsigned int minor)
{
	struct mig *mig;
	char name[16];

	if (minor >= NVIDIA_MIG_GPUS)
		return;
	mig = kzalloc(sizeof(*mig), GFP_KERNEL);
	if (!mig)
		return;
	snprintf(name, sizeof(name), "gpu%u", minor);
	mig->gpu = proc_mkdir(name, nvidia_capabilities_directory());
	mig->directory = mig->gpu ? proc_mkdir("mig", mig->gpu) : NULL;
	mutex_lock(&migs_lock);
	migs[minor] = mig;
	mutex_unlock(&migs_lock);
}

void nvidia_mig_remove_gpu(unsigned int minor)
{
	struct mig *mig;

	if (minor >= NVIDIA_MIG_GPUS)
		return;
	mutex_lock(&migs_lock);
	mig = migs[minor];
	migs[minor] = NULL;
	mutex_unlock(&migs_lock);
	if (mig)
		proc_remove(mig->gpu);
	kfree(mig);
}
