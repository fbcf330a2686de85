/* SPDX-License-Identifier: MIT */
/*
 * Simulation: stand-in for the part of NVIDIA's libcuda that agent/machine/gpu_test.py uses. It runs the kernels of
 * gpu_test.ptx by their names, in C, on this computer's processor: nothing is computed on a GPU. Times are simulated
 * too: a copy takes as long as its bytes at the bandwidth below, whatever this computer needs.
 *
 * The file that SIMULATED_CUDA names, by default /run/simulated-cuda, has a line for each device: its UUID, and faults:
 *   wrong=NAME      one word of what this kernel or copy writes has a wrong bit; `check` finds nothing;
 *                   cuDeviceGetUuid tells another one
 *   slow=SHARE      copies have only this share of the bandwidth
 *   fail=NAME:CODE  this function returns this error
 *   hang=NAME       this function never returns
 *   unknown         the driver does not say how fast the memory is
 *   alone           the device reaches no other one's memory
 *   full            another program has most of the memory
 * Functions that concern no device have the faults of the first one.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CUDA_API __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define MAX_REGIONS 64
#define MEMORY (80ull << 20)
#define FREE (MEMORY - (1 << 20))
#define PROCESSORS 3
#define CLOCK 1000000 /* kHz */
#define WIDTH 1024    /* bits; so the memory's peak is 256 GB/s */
#define EFFICIENCY 0.8
#define LINK 12e9 /* bytes per second */
#define BROKEN 7

/* Of CUresult (cuda.h). */
#define ERRORS(X)                                                                                                 \
	X(INVALID_VALUE, 1) X(OUT_OF_MEMORY, 2) X(NOT_INITIALIZED, 3) X(NO_DEVICE, 100) X(INVALID_DEVICE, 101)    \
	X(INVALID_CONTEXT, 201) X(ECC_UNCORRECTABLE, 214) X(PEER_ACCESS_UNSUPPORTED, 217) X(INVALID_PTX, 218)     \
	X(JIT_COMPILER_NOT_FOUND, 221) X(FILE_NOT_FOUND, 301) X(INVALID_HANDLE, 400) X(NOT_FOUND, 500)            \
	X(ILLEGAL_ADDRESS, 700) X(SYSTEM_NOT_READY, 802) X(MPS_CONNECTION_FAILED, 805) X(UNKNOWN, 999)
#define CODE(name, code) name = code,
#define NAME(name, code) {code, "CUDA_ERROR_" #name},

enum { SUCCESS = 0, ERRORS(CODE) };

static const struct {
	int code;
	const char *name;
} errors[] = {ERRORS(NAME)};

struct region {
	unsigned char *start;
	size_t size;
	struct device *owner; /* NULL: of the host */
};

struct device {
	char uuid[64], faults[256];
	size_t used;
	int context;              /* a context was made */
	struct device *reached;   /* whose memory the context reaches */
	double clock;             /* simulated seconds */
};

static struct device devices[MAX_DEVICES], *current;
static struct region regions[MAX_REGIONS];
static int device_count, initialised, region_count;

/* Return what follows a fault's name, or NULL. A name ends with the word. */
static const char *fault(const struct device *device, const char *kind, const char *name)
{
	const char *at = device->faults;
	size_t length = strlen(kind), rest = strlen(name);

	while ((at = strstr(at, kind))) {
		if (!strncmp(at + length, name, rest) && (!rest || strchr(": \n", at[length + rest])))
			return at + length + rest;
		at += length;
	}
	return NULL;
}

static int begin(const struct device *device, const char *function)
{
	const char *code = fault(device, "fail=", function);

	if (fault(device, "hang=", function)) {
		fprintf(stderr, "simulation: %s hangs\n", function);
		for (;;)
			pause();
	}
	return code ? atoi(code + 1) : SUCCESS;
}

#define CHECK(condition, error)             \
	do {                                \
		if (!(condition))           \
			return error;       \
	} while (0)
#define BEGIN(device)                                  \
	do {                                           \
		int error = begin(device, __func__);   \
		CHECK(!error, error);                  \
	} while (0)
#define BEGIN_DEVICE(number)                                                    \
	do {                                                                    \
		CHECK(initialised, NOT_INITIALIZED);                            \
		CHECK(number >= 0 && number < device_count, INVALID_DEVICE);    \
		BEGIN(&devices[number]);                                        \
	} while (0)
#define BEGIN_CONTEXT()                             \
	do {                                        \
		CHECK(current, INVALID_CONTEXT);    \
		BEGIN(current);                     \
	} while (0)

/* Return the memory at an address, if the current context reaches all of it. */
static void *reach(uint64_t address, size_t size)
{
	unsigned char *start = (unsigned char *)(uintptr_t)address;

	for (int i = 0; i < region_count; i++) {
		struct region *each = &regions[i];

		if (start >= each->start && start + size <= each->start + each->size)
			return each->owner && (each->owner == current || each->owner == current->reached) ? start : NULL;
	}
	return NULL;
}

static int allocate(void **result, size_t size, struct device *owner)
{
	struct region *each = &regions[region_count];

	CHECK(size, INVALID_VALUE);
	CHECK(region_count < MAX_REGIONS && (!owner || owner->used + size <= FREE), OUT_OF_MEMORY);
	each->start = malloc(size);
	CHECK(each->start, OUT_OF_MEMORY);
	memset(each->start, 0xa5, size);
	each->size = size;
	each->owner = owner;
	if (owner)
		owner->used += size;
	region_count++;
	*result = each->start;
	return SUCCESS;
}

/* Break a word near the beginning of what was written, unless that is only a result of `check`. */
static void spoil(const char *name, void *data, size_t words)
{
	if (words > BROKEN && fault(current, "wrong=", name))
		((uint32_t *)data)[BROKEN] ^= 1u << 9;
}

static int copy(const char *function, void *to, const void *from, size_t size, double bandwidth)
{
	const char *share = fault(current, "slow=", "");

	CHECK(to && from, INVALID_VALUE);
	memcpy(to, from, size);
	spoil(function, to, size / 4);
	current->clock += (double)size / bandwidth / (share ? atof(share) : 1);
	return SUCCESS;
}

static uint32_t pattern(uint32_t index, uint32_t seed, uint32_t mask)
{
	uint32_t value = index * 0x9e3779b1u + seed;

	return ((value ^ value >> 16) * 0x85ebca6bu) ^ mask;
}

static uint32_t number(void *argument)
{
	return *(uint32_t *)argument;
}

static void *memory(void *argument, size_t size)
{
	return reach(*(uint64_t *)argument, size);
}

static int fill(unsigned int threads, void **arguments)
{
	uint32_t words = number(arguments[1]), *data = memory(arguments[0], words * 4ull);

	(void)threads;
	CHECK(data, ILLEGAL_ADDRESS);
	for (uint32_t i = 0; i < words; i++)
		data[i] = pattern(i, number(arguments[2]), number(arguments[3]));
	spoil("fill", data, words);
	return SUCCESS;
}

static int check(unsigned int threads, void **arguments)
{
	uint32_t words = number(arguments[1]), *data = memory(arguments[0], words * 4ull);
	uint32_t *found = memory(arguments[4], 16);

	(void)threads;
	CHECK(data && found, ILLEGAL_ADDRESS);
	for (uint32_t i = 0; i < words; i++) {
		uint32_t bits = data[i] ^ pattern(i, number(arguments[2]), number(arguments[3]));

		if (!bits)
			continue;
		++*(uint64_t *)found;
		found[2] |= bits;
	}
	if (fault(current, "wrong=", "check"))
		memset(found, 0, 8);
	return SUCCESS;
}

static int compute(unsigned int threads, void **arguments)
{
	uint32_t *out = memory(arguments[0], threads * 4ull), bits;
	float f, u;

	CHECK(out, ILLEGAL_ADDRESS);
	for (unsigned int i = 0; i < threads; i++) {
		uint32_t x = (i & 31) * 0x9e3779b1u + number(arguments[2]);

		/* All warps do the same. */
		for (uint32_t left = i < 32 ? number(arguments[1]) : 0; left; left--) {
			f = left == number(arguments[1]) ? 1.0f : f;
			x = x * 1664525u + 1013904223u;
			bits = x >> 9 | 0x3f000000u;
			memcpy(&u, &bits, 4);
			f = fmaf(f, 0x1.fffffep-2f, u);
			memcpy(&bits, &f, 4);
			x ^= bits;
		}
		out[i] = i < 32 ? x : out[i % 32];
	}
	spoil("compute", out, threads);
	return SUCCESS;
}

static const struct {
	const char *name;
	int (*run)(unsigned int threads, void **arguments);
} kernels[] = {{"fill", fill}, {"check", check}, {"compute", compute}};

/* Read the devices that CUDA_VISIBLE_DEVICES names, in its order. */
static void read_devices(void)
{
	const char *path = getenv("SIMULATED_CUDA"), *visible = getenv("CUDA_VISIBLE_DEVICES");
	char line[512], *names = strdup(visible ? visible : ""), *rest = names, *name;
	FILE *file;

	while (names && (name = strsep(&rest, ",")) && device_count < MAX_DEVICES) {
		struct device *each = &devices[device_count];

		file = fopen(path ? path : "/run/simulated-cuda", "re");
		while (file && fgets(line, sizeof(line), file)) {
			each->faults[0] = '\0';
			if (sscanf(line, "%63s %255[^\n]", each->uuid, each->faults) < 1 || strcmp(each->uuid, name))
				continue;
			device_count++;
			break;
		}
		if (file)
			fclose(file);
	}
	free(names);
}

CUDA_API int cuInit(unsigned int flags)
{
	CHECK(!flags, INVALID_VALUE);
	/* In the usual place, a daemon waits that is broken. */
	CHECK(getenv("CUDA_MPS_PIPE_DIRECTORY"), MPS_CONNECTION_FAILED);
	if (!device_count)
		read_devices();
	CHECK(device_count, NO_DEVICE);
	BEGIN(&devices[0]);
	initialised = 1;
	return SUCCESS;
}

CUDA_API int cuDriverGetVersion(int *version)
{
	BEGIN(&devices[0]);
	*version = 12040;
	return SUCCESS;
}

CUDA_API int cuGetErrorName(int code, const char **name)
{
	for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
		*name = errors[i].name;
		CHECK(errors[i].code != code, SUCCESS);
	}
	*name = NULL;
	return INVALID_VALUE;
}

CUDA_API int cuDeviceGetCount(int *count)
{
	CHECK(initialised, NOT_INITIALIZED);
	*count = device_count;
	return SUCCESS;
}

CUDA_API int cuDeviceGet(int *device, int index)
{
	BEGIN_DEVICE(index);
	*device = index;
	return SUCCESS;
}

CUDA_API int cuDeviceGetName(char *name, int size, int device)
{
	BEGIN_DEVICE(device);
	snprintf(name, size, "simulated GPU");
	return SUCCESS;
}

CUDA_API int cuDeviceGetUuid(unsigned char *uuid, int device)
{
	const char *digits;

	BEGIN_DEVICE(device);
	digits = strchr(devices[device].uuid, '-');
	for (int i = 0; i < 16; i++) {
		digits += strspn(digits, "-");
		CHECK(sscanf(digits, "%2hhx", &uuid[i]) == 1, INVALID_DEVICE);
		digits += 2;
	}
	uuid[15] ^= !!fault(&devices[device], "wrong=", "cuDeviceGetUuid");
	return SUCCESS;
}

CUDA_API int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	int known;

	BEGIN_DEVICE(device);
	known = !fault(&devices[device], "unknown", "");
	switch (attribute) {
	case 16: /* MULTIPROCESSOR_COUNT */
		*value = PROCESSORS;
		return SUCCESS;
	case 18: /* INTEGRATED */
		*value = 0;
		return SUCCESS;
	case 36: /* MEMORY_CLOCK_RATE */
		*value = known ? CLOCK : 0;
		return SUCCESS;
	case 37: /* GLOBAL_MEMORY_BUS_WIDTH */
		*value = known ? WIDTH : 0;
		return SUCCESS;
	default:
		return INVALID_VALUE;
	}
}

CUDA_API int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	BEGIN_DEVICE(device);
	*bytes = MEMORY;
	return SUCCESS;
}

CUDA_API int cuDeviceCanAccessPeer(int *can, int device, int peer)
{
	BEGIN_DEVICE(device);
	CHECK(peer >= 0 && peer < device_count && peer != device, INVALID_DEVICE);
	*can = !fault(&devices[device], "alone", "");
	return SUCCESS;
}

CUDA_API int cuCtxCreate_v2(struct device **context, unsigned int flags, int device)
{
	BEGIN_DEVICE(device);
	CHECK(flags <= 4, INVALID_VALUE);
	*context = current = &devices[device];
	current->context = 1;
	return SUCCESS;
}

CUDA_API int cuCtxSetCurrent(struct device *context)
{
	CHECK(context && context->context, INVALID_CONTEXT);
	current = context;
	BEGIN_CONTEXT();
	return SUCCESS;
}

CUDA_API int cuCtxSynchronize(void)
{
	BEGIN_CONTEXT();
	return SUCCESS;
}

CUDA_API int cuCtxEnablePeerAccess(struct device *peer, unsigned int flags)
{
	BEGIN_CONTEXT();
	CHECK(!flags && peer && peer != current && peer->context, INVALID_VALUE);
	CHECK(!fault(current, "alone", ""), PEER_ACCESS_UNSUPPORTED);
	current->reached = peer;
	return SUCCESS;
}

/* A module is the text of its file. */
CUDA_API int cuModuleLoad(char **module, const char *path)
{
	FILE *file;
	size_t size;

	BEGIN_CONTEXT();
	file = fopen(path, "re");
	CHECK(file, FILE_NOT_FOUND);
	*module = calloc(1, 1 << 16);
	size = *module ? fread(*module, 1, (1 << 16) - 1, file) : 0;
	fclose(file);
	return size && strstr(*module, ".version") ? SUCCESS : INVALID_PTX;
}

CUDA_API int cuModuleGetFunction(const void **function, const char *module, const char *name)
{
	char entry[64];

	BEGIN_CONTEXT();
	snprintf(entry, sizeof(entry), ".entry %s(", name);
	for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
		*function = &kernels[i];
		CHECK(strcmp(kernels[i].name, name) || !strstr(module, entry), SUCCESS);
	}
	return NOT_FOUND;
}

CUDA_API int cuLaunchKernel(const void *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
			    unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
			    void *stream, void **arguments, void **extra)
{
	size_t index = ((const char *)function - (const char *)kernels) / sizeof(kernels[0]);

	BEGIN_CONTEXT();
	CHECK(index < sizeof(kernels) / sizeof(kernels[0]) && !stream, INVALID_HANDLE);
	CHECK(grid_x && block_x && block_x <= 1024 && !shared && arguments && !extra, INVALID_VALUE);
	CHECK(grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1, INVALID_VALUE);
	return kernels[index].run(grid_x * block_x, arguments);
}

CUDA_API int cuMemGetInfo_v2(size_t *unused, size_t *total)
{
	BEGIN_CONTEXT();
	*unused = fault(current, "full", "") ? 1 << 20 : FREE - current->used;
	*total = MEMORY;
	return SUCCESS;
}

CUDA_API int cuMemAlloc_v2(uint64_t *address, size_t size)
{
	void *start = NULL;
	int error;

	BEGIN_CONTEXT();
	error = allocate(&start, size, current);
	*address = (uintptr_t)start;
	return error;
}

CUDA_API int cuMemHostAlloc(void **start, size_t size, unsigned int flags)
{
	BEGIN_CONTEXT();
	CHECK(!flags, INVALID_VALUE);
	return allocate(start, size, NULL);
}

CUDA_API int cuMemsetD32_v2(uint64_t address, unsigned int value, size_t count)
{
	uint32_t *data;

	BEGIN_CONTEXT();
	data = reach(address, count * 4);
	CHECK(data, INVALID_VALUE);
	for (size_t i = 0; i < count; i++)
		data[i] = value;
	return SUCCESS;
}

/* The host's side may also be memory that was not allocated here. */
CUDA_API int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size)
{
	BEGIN_CONTEXT();
	return copy(__func__, reach(to, size), from, size, LINK);
}

CUDA_API int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
	BEGIN_CONTEXT();
	return copy(__func__, to, reach(from, size), size, LINK);
}

CUDA_API int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size)
{
	BEGIN_CONTEXT();
	/* Each byte is read and written. */
	return copy(__func__, reach(to, size), reach(from, size), size, CLOCK * 1e3 * 2 * WIDTH / 8 * EFFICIENCY / 2);
}

CUDA_API int cuEventCreate(double **event, unsigned int flags)
{
	BEGIN_CONTEXT();
	CHECK(!flags, INVALID_VALUE);
	*event = calloc(1, sizeof(**event));
	return *event ? SUCCESS : OUT_OF_MEMORY;
}

CUDA_API int cuEventRecord(double *event, void *stream)
{
	BEGIN_CONTEXT();
	CHECK(event && !stream, INVALID_HANDLE);
	*event = current->clock;
	return SUCCESS;
}

CUDA_API int cuEventElapsedTime(float *milliseconds, const double *start, const double *end)
{
	BEGIN_CONTEXT();
	CHECK(start && end, INVALID_HANDLE);
	*milliseconds = (float)((*end - *start) * 1e3);
	return SUCCESS;
}
