/* SPDX-License-Identifier: MIT */
/* Simulation: finds GPUs through /proc/driver/nvidia of the stand-in kernel module and opens their device nodes. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpus.h"

static struct gpu list[MAX_GPUS];
static unsigned int count;
static int control = -1;

void gpus_field(const char *path, const char *key, char *value, size_t size)
{
	char line[256];
	FILE *file = fopen(path, "re");

	value[0] = '\0';
	if (!file)
		return;
	while (fgets(line, sizeof(line), file)) {
		char *text = line + strlen(key);

		if (strncmp(line, key, strlen(key)) || *text++ != ':')
			continue;
		text += strspn(text, " \t");
		text[strcspn(text, "\n")] = '\0';
		snprintf(value, size, "%s", text);
		break;
	}
	fclose(file);
}

static nvmlReturn_t check_version(void)
{
	char line[256] = "";
	FILE *file = fopen(PROC "/version", "re");
	char *version;

	if (!file)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	version = fgets(line, sizeof(line), file) ? strstr(line, "Kernel Module") : NULL;
	fclose(file);
	if (!version)
		return NVML_ERROR_UNKNOWN;
	version += strlen("Kernel Module");
	version += strspn(version, " ");
	version[strcspn(version, " \n")] = '\0';
	return strcmp(version, NVIDIA_VERSION) ? NVML_ERROR_LIB_RM_VERSION_MISMATCH : NVML_SUCCESS;
}

/* The first open initialises a GPU; only then is its UUID known. */
static void add(const char *slot)
{
	struct gpu *gpu = &list[count];
	char path[512], minor[16], node[32];
	unsigned int function;

	if (count == MAX_GPUS || sscanf(slot, "%x:%x:%x.%x", &gpu->domain, &gpu->bus, &gpu->device, &function) != 4)
		return;
	snprintf(path, sizeof(path), PROC "/gpus/%s/information", slot);
	gpus_field(path, "Device Minor", minor, sizeof(minor));
	if (!minor[0])
		return;
	gpu->minor = (unsigned int)atoi(minor);
	snprintf(node, sizeof(node), "/dev/nvidia%u", gpu->minor);
	gpu->descriptor = open(node, O_RDWR | O_CLOEXEC);
	if (gpu->descriptor < 0)
		return;
	gpus_field(path, "Model", gpu->name, sizeof(gpu->name));
	gpus_field(path, "GPU UUID", gpu->uuid, sizeof(gpu->uuid));
	count++;
}

nvmlReturn_t gpus_open(void)
{
	nvmlReturn_t result = check_version();
	struct dirent **entries;
	int index, found;

	if (result != NVML_SUCCESS)
		return result;
	control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	if (control < 0) /* The real library says "Unknown Error" if the cgroup forbids the node. */
		return errno == ENOENT || errno == ENXIO ? NVML_ERROR_DRIVER_NOT_LOADED : NVML_ERROR_UNKNOWN;
	found = scandir(PROC "/gpus", &entries, NULL, alphasort);
	for (index = 0; index < found; index++) {
		add(entries[index]->d_name);
		free(entries[index]);
	}
	if (found >= 0)
		free(entries);
	return NVML_SUCCESS;
}

void gpus_close(void)
{
	while (count)
		close(list[--count].descriptor);
	if (control >= 0)
		close(control);
	control = -1;
}

unsigned int gpus_count(void)
{
	return count;
}

struct gpu *gpus_at(unsigned int index)
{
	return index < count ? &list[index] : NULL;
}

unsigned int gpus_index(const struct gpu *gpu)
{
	if (mig_is_device(gpu))
		gpu = gpu->parent;
	return gpu >= list && gpu < list + count ? (unsigned int)(gpu - list) : MAX_GPUS;
}

int gpus_is_whole(const struct gpu *device)
{
	return gpus_index(device) != MAX_GPUS && !mig_is_device(device);
}

void gpus_bus_id(const struct gpu *gpu, char *text, size_t size)
{
	snprintf(text, size, "%08X:%02X:%02X.0", gpu->domain, gpu->bus, gpu->device);
}
