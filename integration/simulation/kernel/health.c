// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Simulation: what the GPUs say of their health. The stand-in NVML gives each word its meaning and its healthy value
 * (health.c); this file only keeps the values. A person or a test writes one line at a time to
 * /proc/driver/nvidia/simulated_health, which the real driver lacks:
 *   MINOR WORD VALUE           sets a value               MINOR WORD           forgets it
 * Reading it lists the values, and for each GPU `MINOR opens N`, the number of its open descriptors. A value ends when
 * the GPU is unbound.
 *
 * A change of `recovery_action` goes to the kernel log as Xid 154, as with the real driver since release 565. A value
 * that is forgotten does not: the driver makes a new state of a GPU that was reset, and logs no change from an unknown
 * action (_gpuRefreshRecoveryActionInLock of gpu.c in open-gpu-kernel-modules 570.124.04).
 */
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>

#include "nvidia.h"

static struct value {
	unsigned int minor, value;
	char word[24]; /* empty: free */
} values[256];
static DEFINE_MUTEX(values_lock);

/* Returns the GPU's value of that word; NULL if there is none. With an empty word, one that is free. */
static struct value *find(unsigned int minor, const char *word)
{
	struct value *value;

	for (value = values; value < values + ARRAY_SIZE(values); value++)
		if (!strcmp(value->word, word) && (value->minor == minor || !word[0]))
			return value;
	return NULL;
}

static void log_action(unsigned int minor, unsigned int before, unsigned int now)
{
	static const char *const names[] = { "None", "GPU Reset Required", "Node Reboot Required", "Drain P2P",
					     "Drain and Reset" };
	char text[96];

	if (NVIDIA_BRANCH < 565 || before == now || before >= ARRAY_SIZE(names) || now >= ARRAY_SIZE(names))
		return;
	snprintf(text, sizeof(text), "GPU recovery action changed from 0x%x (%s) to 0x%x (%s)", before, names[before],
		 now, names[now]);
	nvidia_gpu_log_xid(minor, 154, text);
}

static int set(unsigned int minor, const char *word, unsigned int number)
{
	struct value *value = find(minor, word);
	unsigned int before = value ? value->value : 0;

	value = value ?: find(minor, "");
	if (!value)
		return -ENOSPC;
	value->minor = minor;
	value->value = number;
	strscpy(value->word, word, sizeof(value->word));
	if (!strcmp(word, "recovery_action"))
		log_action(minor, before, number);
	return 0;
}

static void forget(unsigned int minor, const char *word)
{
	struct value *value = find(minor, word);

	if (value)
		value->word[0] = '\0';
}

static ssize_t write(struct file *file, const char __user *buffer, size_t count, loff_t *position)
{
	char line[64] = "", word[24];
	unsigned int minor, number;
	int found, error = 0;

	if (count >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, buffer, count))
		return -EFAULT;
	found = sscanf(line, "%u %23s %u", &minor, word, &number);
	if (found < 2)
		return -EINVAL;
	mutex_lock(&values_lock);
	if (found == 3)
		error = set(minor, word, number);
	else
		forget(minor, word);
	mutex_unlock(&values_lock);
	return error ? error : count;
}

static int show(struct seq_file *file, void *data)
{
	const struct value *value;

	mutex_lock(&values_lock);
	for (value = values; value < values + ARRAY_SIZE(values); value++)
		if (value->word[0])
			seq_printf(file, "%u %s %u\n", value->minor, value->word, value->value);
	mutex_unlock(&values_lock);
	nvidia_gpu_show_opens(file);
	return 0;
}

static int open(struct inode *inode, struct file *file)
{
	return single_open(file, show, NULL);
}

static const struct proc_ops operations = {
	.proc_open = open,
	.proc_read = seq_read,
	.proc_lseek = seq_lseek,
	.proc_release = single_release,
	.proc_write = write,
};

struct proc_dir_entry *nvidia_health_file(struct proc_dir_entry *parent)
{
	return proc_create("simulated_health", 0644, parent, &operations);
}

void nvidia_health_remove_gpu(unsigned int minor)
{
	struct value *value;

	mutex_lock(&values_lock);
	for (value = values; value < values + ARRAY_SIZE(values); value++)
		if (value->minor == minor)
			value->word[0] = '\0';
	mutex_unlock(&values_lock);
}
