/* The process of a pod sandbox: it holds the pod's namespaces and reaps its orphans until it is signalled to exit. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal_number)
{
	(void)signal_number;
	_exit(EXIT_SUCCESS);
}

static void reap(int signal_number)
{
	(void)signal_number;
	while (waitpid(-1, NULL, WNOHANG) > 0)
		;
}

int main(void)
{
	struct sigaction on_end = {.sa_handler = end};
	struct sigaction on_child = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};

	if (sigaction(SIGINT, &on_end, NULL) || sigaction(SIGTERM, &on_end, NULL) || sigaction(SIGCHLD, &on_child, NULL))
		return EXIT_FAILURE;
	for (;;)
		pause();
}
