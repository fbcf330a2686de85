/* SPDX-License-Identifier: MIT */
/* Simulation: profiles and instances behind the MIG devices of the stand-in NVML. */
#include <string.h>

#include "gpus.h"

#define SLICE_PROCESSORS 16

/* Those of an H100 80GB, as `nvidia-smi mig -lgip` and `-lcip` list them; `profile` is NVML_GPU_INSTANCE_PROFILE_*. */
static const struct profile {
	unsigned int slices, profile, gi_id, ci_id, memory_mib;
	const char *name;
} profiles[] = {
	{ 1, 0, 19, 0, 9984, "1g.10gb" },  { 2, 1, 14, 1, 20096, "2g.20gb" }, { 3, 2, 9, 2, 40448, "3g.40gb" },
	{ 4, 3, 5, 3, 40448, "4g.40gb" },  { 7, 4, 0, 4, 80640, "7g.80gb" },
};
#define PROFILES (sizeof(profiles) / sizeof(profiles[0]))

struct gpu_instance {
	struct gpu *gpu;
	unsigned int id, slices;
};

static struct gpu_instance instances[MAX_GPUS][MIG_GIS];

static const struct profile *profile_of(unsigned int slices)
{
	unsigned int index;

	for (index = 0; index < PROFILES; index++)
		if (profiles[index].slices == slices)
			return &profiles[index];
	return NULL;
}

const char *mig_profile(unsigned int slices)
{
	const struct profile *profile = profile_of(slices);

	return profile ? profile->name : NULL;
}

unsigned long long mig_memory_mib(const struct gpu *device)
{
	return profile_of(device->gi_slices)->memory_mib;
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	if (!mig_is_device(device) || !attributes)
		return NVML_ERROR_INVALID_ARGUMENT;
	memset(attributes, 0, sizeof(*attributes));
	attributes->multiprocessorCount = device->ci_slices * SLICE_PROCESSORS;
	attributes->gpuInstanceSliceCount = device->gi_slices;
	attributes->computeInstanceSliceCount = device->ci_slices;
	attributes->memorySizeMB = mig_memory_mib(device);
	return NVML_SUCCESS;
}

/* Returns NVML_ERROR_NOT_SUPPORTED for a profile that this GPU lacks, such as one with media extensions. */
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile,
							  nvmlGpuInstanceProfileInfo_t *info)
{
	unsigned int index;

	if (!gpus_is_whole(device) || !info)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (index = 0; index < PROFILES; index++)
		if (profiles[index].profile == profile) {
			memset(info, 0, sizeof(*info));
			info->id = profiles[index].gi_id;
			info->sliceCount = profiles[index].slices;
			info->multiprocessorCount = profiles[index].slices * SLICE_PROCESSORS;
			info->memorySizeMB = profiles[index].memory_mib;
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance)
{
	struct gpu *mig;
	unsigned int index;

	if (!gpus_is_whole(device) || !instance)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (index = 0; (mig = mig_at(device, index)); index++)
		if (mig->gi == id) {
			*instance = &instances[gpus_index(device)][id];
			**instance = (struct gpu_instance){ device, id, mig->gi_slices };
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
	if (!instance || !info)
		return NVML_ERROR_INVALID_ARGUMENT;
	*info = (nvmlGpuInstanceInfo_t){ instance->gpu, instance->id, profile_of(instance->slices)->gi_id,
					 { 0, instance->slices } };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int profile,
								   unsigned int engines,
								   nvmlComputeInstanceProfileInfo_t *info)
{
	unsigned int index;

	if (!instance || engines || !info)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (index = 0; index < PROFILES; index++)
		if (profiles[index].profile == profile && profiles[index].slices <= instance->slices) {
			memset(info, 0, sizeof(*info));
			info->id = profiles[index].ci_id;
			info->sliceCount = profiles[index].slices;
			info->multiprocessorCount = profiles[index].slices * SLICE_PROCESSORS;
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id,
							    nvmlComputeInstance_t *answer)
{
	unsigned int index;

	if (!instance || !answer)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (index = 0; (*answer = mig_at(instance->gpu, index)); index++)
		if ((*answer)->gi == instance->id && (*answer)->ci == id)
			return NVML_SUCCESS;
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
	if (!mig_is_device(instance) || !info)
		return NVML_ERROR_INVALID_ARGUMENT;
	*info = (nvmlComputeInstanceInfo_t){ instance->parent, &instances[gpus_index(instance)][instance->gi],
					     instance->ci, profile_of(instance->ci_slices)->ci_id,
					     { 0, instance->ci_slices } };
	return NVML_SUCCESS;
}

#define ALIAS(name, of) NVML_API __typeof__(of) name __attribute__((alias(#of)))
ALIAS(nvmlDeviceGetAttributes, nvmlDeviceGetAttributes_v2);
ALIAS(nvmlComputeInstanceGetInfo, nvmlComputeInstanceGetInfo_v2);
