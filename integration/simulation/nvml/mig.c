/* SPDX-License-Identifier: MIT */
/*
 * Simulation: the MIG devices that the stand-in NVML sees: compute instances that the stand-in kernel module lists, if
 * this process may open the nodes of the GPU instance and of the compute instance. So a pod sees only its own.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gpus.h"

#define STATE PROC "/simulated_mig"

static struct gpu devices[MAX_GPUS][MIG_GIS][MIG_CIS];

int mig_is_device(const struct gpu *device)
{
	const struct gpu *first = &devices[0][0][0];

	return device >= first && device < first + MAX_GPUS * MIG_GIS * MIG_CIS && device->parent;
}

static int opens(const char *capability)
{
	char path[512], minor[16];
	int descriptor;

	snprintf(path, sizeof(path), PROC "/capabilities/%s/access", capability);
	gpus_field(path, "DeviceFileMinor", minor, sizeof(minor));
	snprintf(path, sizeof(path), "/dev/nvidia-caps/nvidia-cap%s", minor);
	descriptor = open(path, O_RDONLY | O_CLOEXEC);
	if (descriptor >= 0)
		close(descriptor);
	return descriptor >= 0;
}

static int usable(const struct gpu *gpu, unsigned int gi, unsigned int ci)
{
	char of_gi[64], of_ci[64];

	snprintf(of_gi, sizeof(of_gi), "gpu%u/mig/gi%u", gpu->minor, gi);
	snprintf(of_ci, sizeof(of_ci), "gpu%u/mig/gi%u/ci%u", gpu->minor, gi, ci);
	return opens(of_gi) && opens(of_ci);
}

/* The same instance always has the same UUID. */
static struct gpu *fill(struct gpu *gpu, unsigned int gi, unsigned int ci, unsigned int gi_slices,
			unsigned int ci_slices)
{
	struct gpu *device = &devices[gpus_index(gpu)][gi][ci];

	*device = *gpu;
	device->parent = gpu;
	device->gi = gi;
	device->ci = ci;
	device->gi_slices = gi_slices;
	device->ci_slices = ci_slices;
	if (ci_slices == gi_slices)
		snprintf(device->name, sizeof(device->name), "%.60s MIG %s", gpu->name, mig_profile(gi_slices));
	else
		snprintf(device->name, sizeof(device->name), "%.60s MIG %uc.%s", gpu->name, ci_slices,
			 mig_profile(gi_slices));
	snprintf(device->uuid, sizeof(device->uuid), "MIG-51000000-%02x%02x-5000-8000-%04x%04x%02x%02x", gi & 0xff,
		 ci & 0xff, 0, gpu->domain & 0xffff, gpu->bus & 0xff, (gpu->device << 3) & 0xff);
	return device;
}

/* The order is that of the state's lines, where each GPU instance precedes its compute instances. */
struct gpu *mig_at(struct gpu *gpu, unsigned int index)
{
	unsigned int minor, gi, ci, slices, gi_slices = 0;
	struct gpu *found = NULL;
	char line[64];
	FILE *file = fopen(STATE, "re");

	while (file && !found && fgets(line, sizeof(line), file)) {
		if (sscanf(line, "gi %u %u %u", &minor, &gi, &slices) == 3)
			gi_slices = slices;
		if (sscanf(line, "ci %u %u %u %u", &minor, &gi, &ci, &slices) == 4 && minor == gpu->minor &&
		    mig_profile(gi_slices) && usable(gpu, gi, ci) && !index--)
			found = fill(gpu, gi, ci, gi_slices, slices);
	}
	if (file)
		fclose(file);
	return found;
}

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	unsigned int minor;
	char line[64];
	FILE *file;

	if (!gpus_is_whole(device) || !current || !pending)
		return NVML_ERROR_INVALID_ARGUMENT;
	*current = 0;
	file = fopen(STATE, "re");
	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "gpu %u", &minor) == 1 && minor == device->minor)
			*current = 1;
	if (file)
		fclose(file);
	*pending = *current;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *answer)
{
	if (gpus_index(device) == MAX_GPUS || !answer)
		return NVML_ERROR_INVALID_ARGUMENT;
	*answer = (unsigned int)mig_is_device(device);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
	if (!gpus_is_whole(device) || !mig)
		return NVML_ERROR_INVALID_ARGUMENT;
	*mig = mig_at(device, index);
	return *mig ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

#define OF_MIG_DEVICE(function, type, value)                               \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, type *answer); \
	NVML_API nvmlReturn_t function(nvmlDevice_t device, type *answer)  \
	{                                                                  \
		if (!mig_is_device(device) || !answer)                     \
			return NVML_ERROR_INVALID_ARGUMENT;                \
		*answer = (value);                                         \
		return NVML_SUCCESS;                                       \
	}

OF_MIG_DEVICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, nvmlDevice_t, device->parent)
OF_MIG_DEVICE(nvmlDeviceGetGpuInstanceId, unsigned int, device->gi)
OF_MIG_DEVICE(nvmlDeviceGetComputeInstanceId, unsigned int, device->ci)
