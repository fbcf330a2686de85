/* SPDX-License-Identifier: MIT */
/*
 * Simulation: a GPU's registration with its NVLink fabric, by words of the health file (health.c): fabric_state, as
 * NVML_GPU_FABRIC_STATE_*, without which the GPU has no fabric; fabric_status, an nvmlReturn_t; and fabric_health, as
 * NVML_GPU_FABRIC_HEALTH_SUMMARY_*.
 */
#include <stddef.h>
#include <string.h>

#include "gpus.h"

#define COMPLETED 3
#define HEALTHY 1
/* NVML_GPU_FABRIC_HEALTH_MASK_*: each question answered with "no"; with unhealthy routes */
#define HEALTHY_MASK 0x1aa
#define UNHEALTHY_MASK 0x19a

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v3_t *info)
{
	nvmlGpuFabricInfo_v3_t found = { 0 };
	unsigned int size;

	if (gpus_index(device) == MAX_GPUS || !info)
		return NVML_ERROR_INVALID_ARGUMENT;
	size = info->version & 0xffffff;
	if (size < offsetof(nvmlGpuFabricInfo_v3_t, healthSummary))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	found.version = info->version;
	found.state = (unsigned char)health_get(device, "fabric_state", 0);
	found.status = (nvmlReturn_t)health_get(device, "fabric_status", NVML_SUCCESS);
	if (!found.state)
		return NVML_ERROR_NOT_SUPPORTED;
	if (found.state == COMPLETED && found.status == NVML_SUCCESS) {
		memset(found.clusterUuid, 0x11, sizeof(found.clusterUuid));
		found.cliqueId = 1;
		found.healthSummary = (unsigned char)health_get(device, "fabric_health", HEALTHY);
		found.healthMask = found.healthSummary == HEALTHY ? HEALTHY_MASK : UNHEALTHY_MASK;
	}
	memcpy(info, &found, size < sizeof(found) ? size : sizeof(found));
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, void *info)
{
	const size_t first = offsetof(nvmlGpuFabricInfo_v3_t, clusterUuid);
	nvmlGpuFabricInfo_v3_t found = { .version = sizeof(found) };
	nvmlReturn_t result = nvmlDeviceGetGpuFabricInfoV(device, &found);

	if (result == NVML_SUCCESS)
		memcpy(info, (char *)&found + first, offsetof(nvmlGpuFabricInfo_v3_t, healthMask) - first);
	return result;
}
