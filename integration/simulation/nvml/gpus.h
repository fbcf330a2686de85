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

/* Returns whether a handle belongs to a MIG device. */
int mig_is_device(const struct gpu *device);
/* Returns MIG device `index` of a GPU, counting only those whose nodes this process may open; NULL after the last. */
struct gpu *mig_at(struct gpu *gpu, unsigned int index);
/* Returns the name of the profile with that many slices, such as "1g.10gb"; NULL if there is none. */
const char *mig_profile(unsigned int slices);
unsigned long long mig_memory_mib(const struct gpu *device);

#endif
