/* SPDX-License-Identifier: MIT */
/* Simulation: the GPUs that the stand-in NVML sees. */
#ifndef SIMULATED_NVML_GPUS_H
#define SIMULATED_NVML_GPUS_H

#include "abi.h"

#define MAX_GPUS 64

struct gpu {
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
/* The position in the list; MAX_GPUS for a handle that is none of ours. */
unsigned int gpus_index(const struct gpu *gpu);

#endif
