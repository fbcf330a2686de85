/*
 * gpu-probe WORD...: print in JSON what a container can reach.
 * A word with a leading slash is a node to open, any other a library to load by its plain name:
 *   {"open": {"/dev/nvidia0": "OK", "/dev/nvidia1": "EPERM"},
 *    "load": {"libcuda.so.1": {"path": "/usr/lib/x86_64-linux-gnu/libcuda.so.1"}, "libx.so.1": {"error": "..."}}}
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void print_string(const char *text)
{
	putchar('"');
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			printf("\\%c", *text);
		else if ((unsigned char)*text < 0x20)
			printf("\\u%04x", *text);
		else
			putchar(*text);
	}
	putchar('"');
}

static void probe_open(const char *path)
{
	int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);

	print_string(path);
	printf(": \"%s\"", descriptor < 0 ? strerrorname_np(errno) : "OK");
	if (descriptor >= 0)
		close(descriptor);
}

static void probe_load(const char *name)
{
	void *handle = dlopen(name, RTLD_NOW);
	struct link_map *map = NULL;

	print_string(name);
	if (handle && !dlinfo(handle, RTLD_DI_LINKMAP, &map)) {
		printf(": {\"path\": ");
		print_string(map->l_name);
	} else {
		printf(": {\"error\": ");
		print_string(dlerror());
	}
	putchar('}');
}

static void probe_all(char **words, bool nodes)
{
	bool first = true;

	for (; *words; words++) {
		if ((**words == '/') != nodes)
			continue;
		if (!first)
			printf(", ");
		first = false;
		if (nodes)
			probe_open(*words);
		else
			probe_load(*words);
	}
}

int main(int count, char **words)
{
	if (count < 2) {
		fprintf(stderr, "usage: gpu-probe /DEVICE-NODE... LIBRARY.so.N...\n");
		return 2;
	}
	printf("{\"open\": {");
	probe_all(words + 1, true);
	printf("}, \"load\": {");
	probe_all(words + 1, false);
	printf("}}\n");
	return 0;
}
