/* SPDX-License-Identifier: MIT */
/*
 * Simulation: the undocumented table of functions that nvidia-smi asks NVML for before anything else, and without which
 * it stops with "Mismatch in versions". Every entry reports NVML_ERROR_NOT_SUPPORTED, which nvidia-smi shows as N/A.
 */
#include <stddef.h>

#include "abi.h"

#define ENTRIES 512 /* nvidia-smi 550 uses the first 250 */

struct table {
	size_t size; /* in bytes; nvidia-smi uses nothing beyond */
	nvmlReturn_t (*entries[ENTRIES])(void);
};

static struct table table = { .size = sizeof(table) };

static nvmlReturn_t not_supported(void)
{
	return NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlInternalGetExportTable(const void **answer, const void *uuid)
{
	int index;

	if (!answer || !uuid)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (index = 0; index < ENTRIES; index++)
		table.entries[index] = not_supported;
	*answer = &table;
	return NVML_SUCCESS;
}
