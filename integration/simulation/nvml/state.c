/* SPDX-License-Identifier: MIT */
/* Simulation: the state that the stand-in NVML reports: an idle H100 80GB. What tests can set is in health.c. */
#include <string.h>

#include "gpus.h"

#define MIB (1ULL << 20)
#define GIB (1ULL << 30)
#define MEMORY (80 * GIB)
#define DRIVER_MEMORY (1 * GIB)

/* A query with one output, which is the same for every GPU unless a test has changed it. */
#define CONSTANT(function, type, value)                                             \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, type *answer);           \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, type *answer)            \
	{                                                                            \
		if (gpus_index(device) == MAX_GPUS || !answer)                       \
			return NVML_ERROR_INVALID_ARGUMENT;                          \
		*answer = (value);                                                   \
		return NVML_SUCCESS;                                                 \
	}

CONSTANT(nvmlDeviceGetArchitecture, unsigned int, health_get(device, "architecture", HOPPER))
CONSTANT(nvmlDeviceGetBrand, unsigned int, 14) /* NVML_BRAND_NVIDIA */
CONSTANT(nvmlDeviceGetComputeMode, unsigned int, 0) /* default */
CONSTANT(nvmlDeviceGetDisplayActive, unsigned int, 0)
CONSTANT(nvmlDeviceGetDisplayMode, unsigned int, 0)
CONSTANT(nvmlDeviceGetPersistenceMode, unsigned int, health_get(device, "persistence", 0))
CONSTANT(nvmlDeviceGetPerformanceState, unsigned int, 0)
CONSTANT(nvmlDeviceGetPowerUsage, unsigned int, 70000) /* mW */
CONSTANT(nvmlDeviceGetEnforcedPowerLimit, unsigned int, 700000)
CONSTANT(nvmlDeviceGetPowerManagementLimit, unsigned int, 700000)
CONSTANT(nvmlDeviceGetMaxMigDeviceCount, unsigned int, 7)

/* Bytes. A MIG device has its share, and the driver uses none of it. */
static unsigned long long total(const struct gpu *device)
{
	return mig_is_device(device) ? mig_memory_mib(device) * MIB : MEMORY;
}

static unsigned long long reserved(const struct gpu *device)
{
	return mig_is_device(device) ? 0 : DRIVER_MEMORY;
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	if (gpus_index(device) == MAX_GPUS || !major || !minor)
		return NVML_ERROR_INVALID_ARGUMENT;
	*major = 9;
	*minor = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	if (gpus_index(device) == MAX_GPUS || !memory)
		return NVML_ERROR_INVALID_ARGUMENT;
	*memory = (nvmlMemory_t){ total(device), total(device) - reserved(device), reserved(device) };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	if (gpus_index(device) == MAX_GPUS || !memory)
		return NVML_ERROR_INVALID_ARGUMENT;
	memory->total = total(device);
	memory->reserved = reserved(device);
	memory->free = total(device) - reserved(device);
	memory->used = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
	if (gpus_index(device) == MAX_GPUS || !utilization)
		return NVML_ERROR_INVALID_ARGUMENT;
	*utilization = (nvmlUtilization_t){ 0, 0 };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius)
{
	if (gpus_index(device) == MAX_GPUS || sensor || !celsius)
		return NVML_ERROR_INVALID_ARGUMENT;
	*celsius = 30;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, unsigned int *level)
{
	if (gpus_index(one) == MAX_GPUS || gpus_index(other) == MAX_GPUS || !level)
		return NVML_ERROR_INVALID_ARGUMENT;
	*level = 40; /* NVML_TOPOLOGY_NODE: below different root ports of one NUMA node */
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlUnitGetCount(unsigned int *count)
{
	*count = 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count)
{
	*count = 0;
	return NVML_SUCCESS;
}

/* No process ever computes on a simulated GPU. */
#define NO_PROCESSES(function)                                                                    \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, void *processes); \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, void *processes)  \
	{                                                                                          \
		(void)processes;                                                                   \
		if (gpus_index(device) == MAX_GPUS || !count)                                      \
			return NVML_ERROR_INVALID_ARGUMENT;                                        \
		*count = 0;                                                                        \
		return NVML_SUCCESS;                                                               \
	}

NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
