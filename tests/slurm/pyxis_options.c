/* A plugin of SLURM with pyxis' options, and none of its containers: srun knows the words, and what
 * was given is written where the task runs (PYXIS_SAID, of its environment). */

#include <slurm/spank.h>
#include <stdio.h>
#include <string.h>

SPANK_PLUGIN(pyxis_options, 1);

static char said[3][1000];

static int keep(int which, const char *given, int remote)
{
	(void) remote;
	snprintf(said[which], sizeof said[which], "%s", given ? given : "");
	return 0;
}

static struct spank_option options[] = {
	{ "container-image", "IMAGE", "[pyxis] the image", 1, 0, keep },
	{ "container-mounts", "A:B", "[pyxis] folders inside it", 1, 1, keep },
	{ "container-workdir", "PATH", "[pyxis] where to begin", 1, 2, keep },
	SPANK_OPTIONS_TABLE_END
};

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	(void) ac; (void) av;
	for (int i = 0; options[i].name; i++)
		if (spank_option_register(sp, &options[i]) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	char text[4000];
	(void) ac; (void) av;
	snprintf(text, sizeof text, "%s|%s|%s", said[0], said[1], said[2]);
	return said[0][0] && spank_setenv(sp, "PYXIS_SAID", text, 1) != ESPANK_SUCCESS ? -1 : 0;
}
