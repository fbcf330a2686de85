/* SPDX-License-Identifier: MIT */
/* Simulation: the GPUs that the stand-in NVML sees. */
#ifndef SIMULATED_NVML_GPUS_H
#define SIMULATED_NVML_GPUS_H

#include <stddef.h>

#include "abi.h"

#define PROC "/proc/driver/nvidia"
#define MAX_GPUS 64
#define MIG_GIS 15 /* GPU instances of a GPU: nv-caps.c */
#define MIG_CIS 8 /* compute instances of a GPU instance */

/* NVML_DEVICE_ARCH_*; an H100 is Hopper */
#define AMPERE 7
#define HOPPER 9
/* NVML_GPU_RECOVERY_ACTION_* */
#define RECOVERY_RESET 1
#define RECOVERY_REBOOT 2
#define RECOVERY_DRAIN_AND_RESET 4

struct gpu {
	struct gpu *parent; /* the GPU of a MIG device; NULL for a whole GPU */
	unsigned int gi, ci, gi_slices, ci_slices; /* only for a MIG device */
	unsigned int domain, bus, device, minor;
	int descriptor; /* held open from nvmlInit to nvmlShutdown, as the real library does */
	char name[96];
	char uuid[80];
};

/* Fills the list from /proc/driver/nvidia. Leaves out GPUs whose node does not open. */
nvmlReturn_t gpus_open(void);
void gpus_close(void);
unsigned int gpus_count(void);
struct gpu *gpus_at(unsigned int index);
/* Returns a GPU's position in the list; for a MIG device, that of its GPU; for an unknown handle, MAX_GPUS. */
unsigned int gpus_index(const struct gpu *gpu);
int gpus_is_whole(const struct gpu *device);
/* Reads "Key: value" from a file in procfs; without the key, `value` is empty. */
void gpus_field(const char *path, const char *key, char *value, size_t size);

/* Writes the address as nvidia-smi prints it. */
void gpus_bus_id(const struct gpu *gpu, char *text, size_t size);

/* Returns the value of a GPU's word in the health file, or `otherwise` if it has none. */
unsigned int health_get(const struct gpu *device, const char *word, unsigned int otherwise);
/* Sets a word's value ("WORD VALUE"), or forgets it ("WORD"). */
nvmlReturn_t health_write(const struct gpu *device, const char *words);
NVML_API nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned int mode);

/* Answers a field of nvmlDeviceGetFieldValues about the GPU's NVLinks. */
nvmlReturn_t nvlink_field(const struct gpu *device, unsigned int field, unsigned int link, unsigned int *value);

/* What nvidia-smi calls for a reset, in this order; `devices` are the GPUs that it names. */
nvmlReturn_t reset_make_group(void **answer, nvmlDevice_t *devices, unsigned int count);
nvmlReturn_t reset_group_names(void *made, char **names, unsigned int *count);
nvmlReturn_t reset_all(unsigned int count, nvmlDevice_t *devices, nvmlReturn_t *results, unsigned int *nvswitches);

/* Returns whether a handle belongs to a MIG device. */
int mig_is_device(const struct gpu *device);
/* Returns MIG device `index` of a GPU, counting only those whose nodes this process may open; NULL after the last. */
struct gpu *mig_at(struct gpu *gpu, unsigned int index);
/* Returns the name of the profile with that many slices, such as "1g.10gb"; NULL if there is none. */
const char *mig_profile(unsigned int slices);
unsigned long long mig_memory_mib(const struct gpu *device);

#endif
