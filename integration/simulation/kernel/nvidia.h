/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* Simulation: what the files of the stand-in nvidia.ko share with each other and with dependent modules. */
#ifndef SIMULATED_NVIDIA_H
#define SIMULATED_NVIDIA_H

#include <linux/list.h>
#include <linux/notifier.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/types.h>

/* kernel-open/common/inc/nv-chardev-numbers.h of NVIDIA's open modules */
#define NVIDIA_MAJOR 195
#define NVIDIA_GPU_MINORS 248
#define NVIDIA_MODESET_MINOR 254
#define NVIDIA_CTL_MINOR 255

struct nvidia_gpu {
	struct list_head list;
	struct pci_dev *pdev;
	struct proc_dir_entry *proc;
	unsigned int minor;
	unsigned int opens;
	bool removing;
	bool initialised; /* a GPU is initialised by its first open; before that its UUID is unknown */
};

/* Events for nvidia-drm: data is the struct pci_dev. */
enum { NVIDIA_GPU_ADDED, NVIDIA_GPU_REMOVED };

int nvidia_gpu_open(unsigned int minor);
void nvidia_gpu_release(unsigned int minor);
/* Writes an error of that GPU to the kernel log; of no GPU, nothing. */
void nvidia_gpu_log_xid(unsigned int minor, unsigned int xid, const char *text);
void nvidia_gpu_show_opens(struct seq_file *file);

/* Announces every bound GPU to the notifier before it returns, and later ones when they are bound. */
int nvidia_gpu_notify(struct notifier_block *block);
void nvidia_gpu_unnotify(struct notifier_block *block);

int nvidia_chardev_register(void);
void nvidia_chardev_unregister(void);
/* Before driver 545, minor 254 belongs to nvidia.ko's front end, and opens only while nvidia-modeset is loaded. */
void nvidia_modeset_present(bool present);

int nvidia_procfs_register(void);
void nvidia_procfs_unregister(void);
void nvidia_procfs_add_gpu(struct nvidia_gpu *gpu);
void nvidia_procfs_remove_gpu(struct nvidia_gpu *gpu);

struct nvidia_capability {
	unsigned int minor;
	unsigned int mode;
};

int nvidia_capabilities_register(void);
void nvidia_capabilities_unregister(void);
unsigned int nvidia_imex_channels(void);
struct proc_dir_entry *nvidia_capabilities_directory(void);
struct proc_dir_entry *nvidia_capability_file(const char *name, struct proc_dir_entry *parent,
					      const struct nvidia_capability *capability);

/* The tables of nv-caps.c number every possible instance, each GPU instance before its compute instances. */
#define NVIDIA_MIG_GPUS 32
#define NVIDIA_MIG_GIS 15
#define NVIDIA_MIG_CIS 8

static inline unsigned int nvidia_gi_minor(int gpu, int gi)
{
	return 3 + (gpu * NVIDIA_MIG_GIS + gi) * (1 + NVIDIA_MIG_CIS);
}

static inline unsigned int nvidia_ci_minor(int gpu, int gi, int ci)
{
	return nvidia_gi_minor(gpu, gi) + 1 + ci;
}

/* The instances of a bound GPU, which are removed with it. */
void nvidia_mig_add_gpu(unsigned int minor);
void nvidia_mig_remove_gpu(unsigned int minor);
struct proc_dir_entry *nvidia_mig_file(struct proc_dir_entry *parent);

void nvidia_health_remove_gpu(unsigned int minor);
struct proc_dir_entry *nvidia_health_file(struct proc_dir_entry *parent);

#endif
