/* SPDX-License-Identifier: MIT */
/* Simulation: event sets of the stand-in NVML. No event ever comes from a simulated GPU: a wait ends by its time limit. */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "gpus.h"

#define XID_CRITICAL_ERROR 0x8ULL
#define DOUBLE_BIT_ECC_ERROR 0x2ULL
#define SINGLE_BIT_ECC_ERROR 0x1ULL
#define SUPPORTED_EVENTS (XID_CRITICAL_ERROR | DOUBLE_BIT_ECC_ERROR | SINGLE_BIT_ECC_ERROR)

struct event_set {
	unsigned long long registered[MAX_GPUS];
};

NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	*set = calloc(1, sizeof(**set));
	return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

NVML_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	free(set);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	if (gpus_index(device) == MAX_GPUS || !types)
		return NVML_ERROR_INVALID_ARGUMENT;
	*types = SUPPORTED_EVENTS;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	if (gpus_index(device) == MAX_GPUS || !set)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (types & ~SUPPORTED_EVENTS)
		return NVML_ERROR_NOT_SUPPORTED;
	set->registered[gpus_index(device)] |= types;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds)
{
	struct timespec left = { milliseconds / 1000, (milliseconds % 1000) * 1000000L };

	if (!set || !data)
		return NVML_ERROR_INVALID_ARGUMENT;
	while (nanosleep(&left, &left) && errno == EINTR)
		;
	return NVML_ERROR_TIMEOUT;
}
NVML_API __typeof__(nvmlEventSetWait_v2) nvmlEventSetWait __attribute__((alias("nvmlEventSetWait_v2")));
