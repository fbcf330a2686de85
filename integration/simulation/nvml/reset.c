/* SPDX-License-Identifier: MIT */
/*
 * Simulation: the reset of GPUs, as nvidia-smi(1) of release 550 describes it. nvidia-smi first asks for the group of
 * GPUs that must be reset together, and stops if not all are named; then it gives all to one call (export_table.c).
 * Words of the health file (health.c) that matter here: opens, persistence, and for NVLinks: linked, a number that the
 * GPUs of one group share; architecture; and fabric_manager, 1 while it serves the GPU.
 */
#include <stdio.h>
#include <string.h>

#include "gpus.h"

#define NAME 32 /* NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE: how much nvidia-smi allocates for a name */

static struct gpu *group[MAX_GPUS];
static unsigned int in_group;

/* On Ampere, the Fabric Manager separates a GPU from the others; since Hopper, the GPU does it itself. */
static int is_reset_alone(const struct gpu *gpu)
{
	unsigned int architecture = health_get(gpu, "architecture", HOPPER);

	return architecture >= HOPPER || (architecture >= AMPERE && health_get(gpu, "fabric_manager", 0));
}

static int is_linked(const struct gpu *one, const struct gpu *other)
{
	unsigned int link = health_get(one, "linked", 0);

	return link && link == health_get(other, "linked", 0);
}

nvmlReturn_t reset_make_group(void **answer, nvmlDevice_t *devices, unsigned int count)
{
	unsigned int index, named;

	in_group = 0;
	for (index = 0; index < gpus_count(); index++) {
		struct gpu *gpu = gpus_at(index);

		for (named = 0; named < count; named++)
			if (gpu == devices[named] ||
			    (!is_reset_alone(devices[named]) && is_linked(gpu, devices[named]))) {
				group[in_group++] = gpu;
				break;
			}
	}
	*answer = group;
	return NVML_SUCCESS;
}

nvmlReturn_t reset_group_names(void *made, char **names, unsigned int *count)
{
	(void)made;
	for (*count = 0; *count < in_group; ++*count)
		gpus_bus_id(group[*count], names[*count], NAME);
	return NVML_SUCCESS;
}

/* This process has each GPU open once. The persistence daemon, which the bed lacks, would have it open too. */
static nvmlReturn_t refusal(const struct gpu *gpu)
{
	if (health_get(gpu, "opens", 1) > 1 || health_get(gpu, "persistence", 0))
		return NVML_ERROR_IN_USE;
	return NVML_SUCCESS;
}

/* A reset does not repair: rows that could not be remapped, and a GPU that needs a reboot, stay as they are. */
static nvmlReturn_t reset(const struct gpu *gpu)
{
	static const char *const ended[] = { "answer", "ecc_uncorrected", "pages_pending", "rows_pending" };
	nvmlReturn_t result = NVML_SUCCESS;
	size_t index;

	for (index = 0; result == NVML_SUCCESS && index < sizeof(ended) / sizeof(ended[0]); index++)
		result = health_write(gpu, ended[index]);
	if (result == NVML_SUCCESS && health_get(gpu, "recovery_action", 0) != RECOVERY_REBOOT)
		result = health_write(gpu, "recovery_action");
	return result;
}

/* Resets all, or none: nvidia-smi then prints the GPUs whose result is not NVML_SUCCESS. */
nvmlReturn_t reset_all(unsigned int count, nvmlDevice_t *devices, nvmlReturn_t *results, unsigned int *nvswitches)
{
	nvmlReturn_t result = NVML_SUCCESS;
	unsigned int index;

	*nvswitches = 0;
	for (index = 0; index < count; index++)
		if ((results[index] = refusal(devices[index])) != NVML_SUCCESS)
			result = NVML_ERROR_UNKNOWN;
	for (index = 0; result == NVML_SUCCESS && index < count; index++)
		result = reset(devices[index]);
	return result;
}
