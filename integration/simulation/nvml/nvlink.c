/* SPDX-License-Identifier: MIT */
/*
 * Simulation: the NVLinks of a GPU and the errors that they have counted, by words of the health file (health.c):
 * nvlinks, their number, without which the GPU has none; link_replay, link_recovery and link_crc, errors of the last one.
 */
#include "gpus.h"

#define ACTIVE 1
/* NVML_FI_DEV_NVLINK_* */
#define LINK_COUNT 91
#define GET_STATE 165
#define ERROR_DL_REPLAY 161
#define ERROR_DL_RECOVERY 162
#define ERROR_DL_CRC 163

/* `link` is the field's scope. */
nvmlReturn_t nvlink_field(const struct gpu *device, unsigned int field, unsigned int link, unsigned int *value)
{
	static const char *const words[] = { "link_replay", "link_recovery", "link_crc" };
	unsigned int links = health_get(device, "nvlinks", 0);

	if (!links || (field != LINK_COUNT && link >= links))
		return NVML_ERROR_NOT_SUPPORTED;
	if (field == LINK_COUNT)
		*value = links;
	else if (field == GET_STATE)
		*value = ACTIVE;
	else if (field < ERROR_DL_REPLAY || field > ERROR_DL_CRC)
		return NVML_ERROR_NOT_SUPPORTED;
	else
		*value = link + 1 == links ? health_get(device, words[field - ERROR_DL_REPLAY], 0) : 0;
	return NVML_SUCCESS;
}
