/* SPDX-License-Identifier: MIT */
/*
 * Simulation: what a GPU says of its own health. By default it is healthy. A test sets one value of one GPU, such as:
 *   echo 0 ecc_uncorrected 3 >/proc/driver/nvidia/simulated_health
 * Words of values that a reset ends (reset.c): answer, an nvmlReturn_t such as 16 (GPU requires reset), which all
 * questions of this file get but those of a reset; recovery_action, as NVML_GPU_RECOVERY_ACTION_*; ecc_uncorrected;
 * pages_pending; rows_pending.
 * Words of those that it does not: rows_correctable, rows_uncorrectable, rows_failed; clock_reasons, a mask of
 * nvmlClocksEventReasons, 136 for a hardware power brake; fabric_state, fabric_status, fabric_health (fabric.c);
 * nvlinks and link_* (nvlink.c); persistence, which `nvidia-smi -pm` sets. architecture, as NVML_DEVICE_ARCH_*, is what
 * the GPU is: GPUs before Ampere retire pages, later ones remap rows.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gpus.h"

#define HEALTH PROC "/simulated_health"
#define CLOCK_REASONS 0x1ff /* nvmlClocksEventReasonAll */
#define GPU_IDLE 0x1
/* NVML_FI_DEV_* */
#define RESET_STATUS 226
#define DRAIN_AND_RESET_STATUS 227
#define GET_GPU_RECOVERY_ACTION 230

#define ALIAS(name, of) NVML_API __typeof__(of) name __attribute__((alias(#of)))
/* Returns from the function if the GPU does not answer, or if what it is asked is not `supported`. */
#define ANSWER(device, answer, supported)                                                       \
	do {                                                                                    \
		if (gpus_index(device) == MAX_GPUS || !(answer))                                \
			return NVML_ERROR_INVALID_ARGUMENT;                                     \
		if (health_get(device, "answer", NVML_SUCCESS))                                 \
			return (nvmlReturn_t)health_get(device, "answer", NVML_SUCCESS);        \
		if (!(supported))                                                               \
			return NVML_ERROR_NOT_SUPPORTED;                                        \
	} while (0)

/* The last line with the word counts; without a value there, the word is forgotten. */
unsigned int health_get(const struct gpu *device, const char *word, unsigned int otherwise)
{
	unsigned int minor, value, answer = otherwise;
	char line[64], found[24];
	FILE *file = fopen(HEALTH, "re");

	while (file && fgets(line, sizeof(line), file)) {
		int words = sscanf(line, "%u %23s %u", &minor, found, &value);

		if (words >= 2 && minor == device->minor && !strcmp(found, word))
			answer = words == 3 ? value : otherwise;
	}
	if (file)
		fclose(file);
	return answer;
}

nvmlReturn_t health_write(const struct gpu *device, const char *words)
{
	int file = open(HEALTH, O_WRONLY | O_APPEND | O_CLOEXEC), written;

	if (file < 0)
		return errno == EACCES || errno == EPERM ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_NOT_SUPPORTED;
	written = dprintf(file, "%u %s\n", device->minor, words);
	close(file);
	return written > 0 ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

static int remaps_rows(const struct gpu *device)
{
	return health_get(device, "architecture", HOPPER) >= AMPERE;
}

/* A question with one answer. */
#define QUESTION(function, type, supported, value)                         \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, type *answer); \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, type *answer)  \
	{                                                                  \
		ANSWER(device, answer, supported);                         \
		*answer = (value);                                         \
		return NVML_SUCCESS;                                       \
	}

QUESTION(nvmlDeviceGetRetiredPagesPendingStatus, unsigned int, !remaps_rows(device),
	 health_get(device, "pages_pending", 0))
QUESTION(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 1, CLOCK_REASONS)
QUESTION(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 1, health_get(device, "clock_reasons", GPU_IDLE))
ALIAS(nvmlDeviceGetSupportedClocksThrottleReasons, nvmlDeviceGetSupportedClocksEventReasons);
ALIAS(nvmlDeviceGetCurrentClocksThrottleReasons, nvmlDeviceGetCurrentClocksEventReasons);

NVML_API nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned int mode)
{
	if (!gpus_is_whole(device) || mode > 1)
		return NVML_ERROR_INVALID_ARGUMENT;
	return health_write(device, mode ? "persistence 1" : "persistence");
}

/* Of errors since the start of the driver; those since the GPU was made are not simulated. */
NVML_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int is_uncorrected,
						  unsigned int is_aggregate, unsigned long long *errors)
{
	ANSWER(device, errors, !is_aggregate);
	*errors = is_uncorrected ? health_get(device, "ecc_uncorrected", 0) : 0;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, nvmlRemappedRowsInfo_v2_t *rows)
{
	ANSWER(device, rows, remaps_rows(device));
	*rows = (nvmlRemappedRowsInfo_v2_t){
		.corrActiveRemaps = health_get(device, "rows_correctable", 0),
		.uncActiveRemaps = health_get(device, "rows_uncorrectable", 0),
		.bPending = health_get(device, "rows_pending", 0),
		.bFailureOccurred = health_get(device, "rows_failed", 0),
	};
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable,
						unsigned int *uncorrectable, unsigned int *is_pending,
						unsigned int *has_failed)
{
	nvmlRemappedRowsInfo_v2_t rows;
	nvmlReturn_t result = nvmlDeviceGetRemappedRows_v2(device, &rows);

	if (result != NVML_SUCCESS)
		return result;
	*correctable = rows.corrActiveRemaps;
	*uncorrectable = rows.uncActiveRemaps;
	*is_pending = rows.bPending;
	*has_failed = rows.bFailureOccurred;
	return NVML_SUCCESS;
}

static nvmlReturn_t field(const struct gpu *device, nvmlFieldValue_t *field)
{
	unsigned int action = health_get(device, "recovery_action", 0);

	field->valueType = 1; /* NVML_VALUE_TYPE_UNSIGNED_INT */
	switch (field->fieldId) {
	case GET_GPU_RECOVERY_ACTION:
		field->value.uiVal = action;
		return NVML_SUCCESS;
	case RESET_STATUS:
		field->value.uiVal = action == RECOVERY_RESET;
		return NVML_SUCCESS;
	case DRAIN_AND_RESET_STATUS:
		field->value.uiVal = action == RECOVERY_DRAIN_AND_RESET;
		return NVML_SUCCESS;
	default:
		return nvlink_field(device, field->fieldId, field->scopeId, &field->value.uiVal);
	}
}

NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	ANSWER(device, values, 1);
	for (; count > 0; count--, values++)
		values->nvmlReturn = field(device, values);
	return NVML_SUCCESS;
}
