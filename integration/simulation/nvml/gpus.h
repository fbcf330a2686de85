/* SPDX-License-Identifier: MIT */
/* Simulation: the GPUs that the stand-in NVML sees. */
#ifndef SIMULATED_NVML_GPUS_H
#define SIMULATED_NVML_GPUS_H

#include <stddef.h>

#include "abi.h"

#define PROC "/proc/driver/nvidia"
#define MAX_GPUS 64
#define MIG_GIS 15 /* instances of a GPU, and compute instances of one: nv-caps.c */
#define MIG_CIS 8

struct gpu {
	struct gpu *parent; /* of a MIG device; NULL for a whole GPU */
	unsigned int gi, ci, gi_slices, ci_slices; /* of a MIG device */
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
/* The position in the list, of a MIG device that of its GPU; MAX_GPUS for a handle that is none of ours. */
unsigned int gpus_index(const struct gpu *gpu);
int gpus_is_whole(const struct gpu *device);
/* "Key: value" of a file in procfs; an absent key leaves `value` empty. */
void gpus_field(const char *path, const char *key, char *value, size_t size);

/* Whether a handle is that of a MIG device. */
int mig_is_device(const struct gpu *device);
/* The MIG device of that number among those of a GPU that this process has the nodes of; NULL behind the last. */
struct gpu *mig_at(struct gpu *gpu, unsigned int index);
/* The name of the profile with that many slices, such as "1g.10gb"; NULL when there is none. */
const char *mig_profile(unsigned int slices);
unsigned long long mig_memory_mib(const struct gpu *device);

#endif
