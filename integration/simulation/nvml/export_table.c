/* SPDX-License-Identifier: MIT */
/*
 * Simulation: the undocumented table of functions that nvidia-smi asks NVML for before anything else, and without which
 * it stops with "Mismatch in versions". The entries that are simulated, and what their arguments mean, were found by
 * running nvidia-smi 535, 550 and 580, which agree on them. Every other entry reports NVML_ERROR_NOT_SUPPORTED, which
 * nvidia-smi shows as N/A.
 */
#include <stdio.h>

#include "gpus.h"

#define ENTRIES 512 /* nvidia-smi 580 uses the first 263 */

typedef void (*entry)(void);

struct table {
	size_t size; /* in bytes; nvidia-smi uses nothing beyond */
	entry entries[ENTRIES];
};

static struct table table = { .size = sizeof(table) };

static nvmlReturn_t not_supported(void)
{
	return NVML_ERROR_NOT_SUPPORTED;
}

/* nvidia-smi -i ADDRESS has each GPU's address compared with these four numbers. The domain may be missing. */
static nvmlReturn_t parse_address(const char *text, unsigned int *domain, unsigned int *bus, unsigned int *device,
				  unsigned int *function)
{
	int end = 0;

	*domain = *function = 0;
	if (sscanf(text, "%x:%x:%x.%x%n", domain, bus, device, function, &end) != 4) {
		*domain = 0;
		if (sscanf(text, "%x:%x.%x%n", bus, device, function, &end) != 3)
			return NVML_ERROR_INVALID_ARGUMENT;
	}
	return text[end] ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

static nvmlReturn_t address_at(unsigned int index, unsigned int *domain, unsigned int *bus, unsigned int *device)
{
	const struct gpu *gpu = gpus_at(index);

	if (!gpu)
		return NVML_ERROR_INVALID_ARGUMENT;
	*domain = gpu->domain;
	*bus = gpu->bus;
	*device = gpu->device;
	return NVML_SUCCESS;
}

/* Only a GPU that boots the display is primary. */
static nvmlReturn_t is_primary(nvmlDevice_t device, unsigned int *answer)
{
	(void)device;
	*answer = 0;
	return NVML_SUCCESS;
}

/* By it, nvidia-smi decides how it resets. After this answer, it gives all GPUs to reset_all. */
static nvmlReturn_t fabric_state(unsigned int *answer)
{
	*answer = 0;
	return NVML_SUCCESS;
}

/* Since release 580, instead of nvmlDeviceSetPersistenceMode. */
static nvmlReturn_t set_persistence(nvmlDevice_t device, unsigned int mode, unsigned int *is_by_daemon)
{
	*is_by_daemon = 0;
	return nvmlDeviceSetPersistenceMode(device, mode);
}

static const struct {
	int index;
	entry function;
} known[] = {
	{ 11, (entry)parse_address },	 { 19, (entry)is_primary },	  { 74, (entry)address_at },
	{ 167, (entry)reset_all },	 { 168, (entry)fabric_state },	  { 181, (entry)reset_make_group },
	{ 182, (entry)reset_group_names }, { 250, (entry)set_persistence },
};

NVML_API nvmlReturn_t nvmlInternalGetExportTable(const void **answer, const void *uuid)
{
	size_t index;

	if (!answer || !uuid)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (index = 0; index < ENTRIES; index++)
		table.entries[index] = (entry)not_supported;
	for (index = 0; index < sizeof(known) / sizeof(known[0]); index++)
		table.entries[known[index].index] = known[index].function;
	*answer = &table;
	return NVML_SUCCESS;
}
