/* control_groups.c — see control_groups.h. */
#include "llmc/util/control_groups.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { PATH_BYTES = 1024 };

static bool names(const char *controllers, const char *one) {
    const size_t bytes = strlen(one);
    for (const char *at = controllers; (at = strstr(at, one)); at += bytes)
        if ((at == controllers || at[-1] == ',') && (at[bytes] == ',' || !at[bytes])) return true;
    return false;
}

static void visit_upward(const char *mount, const char *name, control_group_visit visit,
                         void *context) {
    char group[PATH_BYTES], directory[PATH_BYTES];
    snprintf(group, sizeof group, "%s", name);
    for (size_t length = strlen(group) + 1; length--;) {
        if (group[length] && group[length] != '/') continue;
        group[length] = 0;
        if (snprintf(directory, sizeof directory, "%s%s", mount, group) < PATH_BYTES)
            visit(context, directory, *group ? group : "/");
    }
}

/* A line of /proc/self/cgroup: NUMBER:CONTROLLERS:GROUP; version 2 has no controllers. */
void control_groups_visit(const char *root, const char *controller, control_group_visit visit,
                          void *context) {
    char mount[2 * PATH_BYTES], line[PATH_BYTES];
    snprintf(mount, sizeof mount, "%.512s/proc/self/cgroup", root);
    FILE *file = fopen(mount, "re");
    while (file && fgets(line, sizeof line, file)) {
        char *controllers = strchr(line, ':'),
             *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        const bool first = *++controllers; /* version 1 */
        if (first && !names(controllers, controller)) continue;
        const char *const mounts[] = {first ? controllers : "", first ? controller : "unified"};
        for (int i = 0; i < (strcmp(mounts[0], mounts[1]) ? 2 : 1); i++) {
            snprintf(mount, sizeof mount, "%.512s/sys/fs/cgroup%s%s", root, *mounts[i] ? "/" : "",
                     mounts[i]);
            visit_upward(mount, group, visit, context);
        }
    }
    if (file) fclose(file);
}
