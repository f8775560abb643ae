/* control_groups.h — the control groups that this process is in. */
#ifndef LLMC_UTIL_CONTROL_GROUPS_H
#define LLMC_UTIL_CONTROL_GROUPS_H

/* directory: where the kernel shows a group's limits, shorter than 1024; group: its name, "/job" or "/". */
typedef void (*control_group_visit)(void *context, const char *directory, const char *group);

/* Visits the process's group for a controller, "cpu" or "memory", and those around it, of versions 1 and 2. In
 * a container the group's path may be the one outside; its folders are missing then, and the last one is the
 * container's own group. root: "" for the machine; tests have another. */
void control_groups_visit(const char *root, const char *controller, control_group_visit visit,
                          void *context);

#endif
