/* SPDX-License-Identifier: MIT */
/*
 * Simulation: event sets of the stand-in NVML. A simulated GPU has one event, an Xid that somebody raises by
 *   echo MINOR XID >/sys/module/nvidia/parameters/simulated_xid
 * As with a real GPU, every process that watches the GPU sees the event. A wait checks for it twice a second.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpus.h"

#define XID_CRITICAL_ERROR 0x8ULL
#define DOUBLE_BIT_ECC_ERROR 0x2ULL
#define SINGLE_BIT_ECC_ERROR 0x1ULL
#define RAISED "/sys/module/nvidia/parameters/simulated_xid"
#define LOOK_MS 500U
#define NO_INSTANCE 0xFFFFFFFFU /* of MIG */
#define SUPPORTED_EVENTS (XID_CRITICAL_ERROR | DOUBLE_BIT_ECC_ERROR | SINGLE_BIT_ECC_ERROR)

struct event_set {
	unsigned long long registered[MAX_GPUS];
	char seen[32]; /* the last raised Xid */
};

static void read_raised(char *text, size_t size)
{
	FILE *file = fopen(RAISED, "re");

	if (!file || !fgets(text, (int)size, file))
		text[0] = '\0';
	if (file)
		fclose(file);
}

/* Returns whether the set has a new event, and marks it as seen. */
static int take(nvmlEventSet_t set, nvmlEventData_t *data)
{
	unsigned long long xid;
	unsigned int index, minor;
	char raised[sizeof(set->seen)];

	read_raised(raised, sizeof(raised));
	if (!strcmp(raised, set->seen))
		return 0;
	strcpy(set->seen, raised);
	if (sscanf(raised, "%u %llu", &minor, &xid) != 2)
		return 0;
	for (index = 0; index < gpus_count(); index++) {
		if (gpus_at(index)->minor != minor || !(set->registered[index] & XID_CRITICAL_ERROR))
			continue;
		*data = (nvmlEventData_t){ gpus_at(index), XID_CRITICAL_ERROR, xid, NO_INSTANCE, NO_INSTANCE };
		return 1;
	}
	return 0;
}

static void sleep_ms(unsigned int milliseconds)
{
	struct timespec left = { milliseconds / 1000, (milliseconds % 1000) * 1000000L };

	while (nanosleep(&left, &left) && errno == EINTR)
		;
}

NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	*set = calloc(1, sizeof(**set));
	if (!*set)
		return NVML_ERROR_MEMORY;
	read_raised((*set)->seen, sizeof((*set)->seen));
	return NVML_SUCCESS;
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
	unsigned int waited;

	if (!set || !data)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (waited = 0; waited < milliseconds; waited += LOOK_MS) {
		if (take(set, data))
			return NVML_SUCCESS;
		sleep_ms(milliseconds - waited < LOOK_MS ? milliseconds - waited : LOOK_MS);
	}
	return NVML_ERROR_TIMEOUT;
}
