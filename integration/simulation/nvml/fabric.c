/* SPDX-License-Identifier: MIT */
/*
 * Simulation: the GPUs' registration with the NVLink fabric. A test sets it for all GPUs, as nvmlGpuFabricState_t and
 * nvmlReturn_t:
 *   echo 3 0 >/sys/module/nvidia/parameters/simulated_fabric
 */
#include <stdio.h>
#include <string.h>

#include "gpus.h"

#define FABRIC "/sys/module/nvidia/parameters/simulated_fabric"
#define COMPLETED 3

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info);
NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info)
{
	unsigned int state = 0, status = 0, version;
	FILE *file;

	if (gpus_index(device) == MAX_GPUS || !info)
		return NVML_ERROR_INVALID_ARGUMENT;
	version = info->version;
	if ((version & 0xffffff) < sizeof(*info))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	file = fopen(FABRIC, "re");
	if (file) {
		if (fscanf(file, "%u %u", &state, &status) != 2)
			state = 0;
		fclose(file);
	}
	if (!state)
		return NVML_ERROR_NOT_SUPPORTED;
	memset(info, 0, sizeof(*info));
	info->version = version;
	info->state = (unsigned char)state;
	info->status = (nvmlReturn_t)status;
	if (state == COMPLETED && !status) {
		memset(info->clusterUuid, 0x11, sizeof(info->clusterUuid));
		info->cliqueId = 1;
	}
	return NVML_SUCCESS;
}
