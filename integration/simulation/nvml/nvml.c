/* SPDX-License-Identifier: MIT */
/*
 * Simulation: stand-in for NVIDIA's libnvidia-ml. It answers nvidia-smi, nvidia-ctk and the device plugin from what the
 * stand-in kernel module shows. Every other function of the real library's list reports NVML_ERROR_NOT_SUPPORTED.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "gpus.h"

#define CUDA_VERSION 12040 /* of the 550 branch */
#define H100_ID 0x233010deU
#define H100_SUBSYSTEM_ID 0x16c110deU
#define ALIAS(name, of) NVML_API __typeof__(of) name __attribute__((alias(#of)))
#define CHECK(condition)                            \
	do {                                        \
		if (!(condition))                   \
			return NVML_ERROR_INVALID_ARGUMENT; \
	} while (0)
#define CHECK_DEVICE(device, answer)                                    \
	do {                                                            \
		if (!users)                                             \
			return NVML_ERROR_UNINITIALIZED;                \
		CHECK(gpus_index(device) != MAX_GPUS && (answer));      \
	} while (0)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned int users;

static nvmlReturn_t copy(char *target, unsigned int size, const char *text)
{
	CHECK(target);
	if (strlen(text) >= size)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(target, text);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlInit_v2(void)
{
	nvmlReturn_t result = NVML_SUCCESS;

	pthread_mutex_lock(&lock);
	if (!users)
		result = gpus_open();
	if (result == NVML_SUCCESS)
		users++;
	else
		gpus_close();
	pthread_mutex_unlock(&lock);
	return result;
}
ALIAS(nvmlInit, nvmlInit_v2);

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	(void)flags;
	return nvmlInit_v2();
}

NVML_API nvmlReturn_t nvmlShutdown(void)
{
	nvmlReturn_t result = NVML_ERROR_UNINITIALIZED;

	pthread_mutex_lock(&lock);
	if (users) {
		result = NVML_SUCCESS;
		if (!--users)
			gpus_close();
	}
	pthread_mutex_unlock(&lock);
	return result;
}

NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
	switch (result) {
	case NVML_SUCCESS: return "Success";
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
	case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
	case NVML_ERROR_NOT_FOUND: return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
	case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case NVML_ERROR_TIMEOUT: return "Timeout";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
	case NVML_ERROR_IN_USE: return "In use by another client";
	case NVML_ERROR_MEMORY: return "Insufficient Memory";
	case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument Version Mismatch";
	case NVML_ERROR_UNKNOWN: break;
	}
	return "Unknown Error";
}

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
	return copy(version, size, NVIDIA_VERSION);
}

NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int size)
{
	return copy(version, size, "12." NVIDIA_VERSION);
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	CHECK(version);
	*version = CUDA_VERSION;
	return NVML_SUCCESS;
}
ALIAS(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2);

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	CHECK(count);
	*count = gpus_count();
	return users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}
ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2);

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	CHECK(device && gpus_at(index));
	*device = gpus_at(index);
	return NVML_SUCCESS;
}
ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2);

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	unsigned int index;

	CHECK(uuid && device);
	for (index = 0; index < gpus_count(); index++) {
		struct gpu *gpu = gpus_at(index), *mig;
		unsigned int of_gpu;

		if (!strcasecmp(gpu->uuid, uuid))
			return nvmlDeviceGetHandleByIndex_v2(index, device);
		for (of_gpu = 0; (mig = mig_at(gpu, of_gpu)); of_gpu++)
			if (!strcasecmp(mig->uuid, uuid)) {
				*device = mig;
				return NVML_SUCCESS;
			}
	}
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device)
{
	unsigned int index, domain = 0, bus, slot;

	CHECK(id && device);
	if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
		domain = 0;
		CHECK(sscanf(id, "%x:%x", &bus, &slot) == 2);
	}
	for (index = 0; index < gpus_count(); index++) {
		struct gpu *gpu = gpus_at(index);

		if (gpu->domain == domain && gpu->bus == bus && gpu->device == slot)
			return nvmlDeviceGetHandleByIndex_v2(index, device);
	}
	return NVML_ERROR_NOT_FOUND;
}
ALIAS(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2);

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int size)
{
	CHECK_DEVICE(device, name);
	return copy(name, size, device->name);
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int size)
{
	CHECK_DEVICE(device, uuid);
	return copy(uuid, size, device->uuid);
}

NVML_API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
	CHECK_DEVICE(device, minor);
	*minor = device->minor;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	CHECK_DEVICE(device, index);
	if (!mig_is_device(device)) {
		*index = gpus_index(device);
		return NVML_SUCCESS;
	}
	for (*index = 0; mig_at(device->parent, *index); ++*index)
		if (mig_at(device->parent, *index) == device)
			return NVML_SUCCESS;
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	CHECK_DEVICE(device, pci);
	memset(pci, 0, sizeof(*pci));
	pci->domain = device->domain;
	pci->bus = device->bus;
	pci->device = device->device;
	pci->pciDeviceId = H100_ID;
	pci->pciSubSystemId = H100_SUBSYSTEM_ID;
	snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", device->domain & 0xffff,
		 device->bus & 0xff, device->device & 0xff);
	gpus_bus_id(device, pci->busId, sizeof(pci->busId));
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci)
{
	CHECK_DEVICE(device, pci);
	pci->domain = device->domain;
	pci->bus = device->bus;
	pci->device = device->device;
	pci->pciDeviceId = H100_ID;
	pci->pciSubSystemId = H100_SUBSYSTEM_ID;
	pci->baseClass = 0x03;
	pci->subClass = 0x02;
	gpus_bus_id(device, pci->busId, sizeof(pci->busId));
	return NVML_SUCCESS;
}
