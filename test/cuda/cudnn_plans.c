/* cudnn_plans.c — makes cuDNN's plans for attention without a device, for test_cudnn.py.
 *
 *     cudnn_plans PROPERTIES B T H K D ...
 *
 * PROPERTIES is a file with a device's properties as cuDNN writes them (JSON). The program prints
 * cuDNN's version. For each shape it prints the bytes of workspace and the bytes that the memory
 * plan counts, or the reason why there is no plan. */
#include "llmc/backend/cuda/attention/cudnn_plan.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    static char properties[1 << 16];
    FILE *file = argc > 1 ? fopen(argv[1], "r") : NULL;
    if (!file || !fread(properties, 1, sizeof properties - 1, file) || fclose(file)) return 2;
    const int version = cudnn_attention_open();
    if (!version) {
        printf("%s\n", cudnn_why);
        return 1;
    }
    printf("%d\n", version);
    for (int i = 2; i + 4 < argc; i += 5) {
        int shape[5];
        for (int k = 0; k < 5; k++) shape[k] = atoi(argv[i + k]);
        const size_t bytes =
            cudnn_attention_plan(shape[0], shape[1], shape[2], shape[3], shape[4], properties);
        if (bytes == 0) {
            printf("%s\n", cudnn_why);
            continue;
        }
        printf("%zu %.0f\n", bytes,
               cudnn_attention_bytes(shape[0], shape[1], shape[2], shape[3], shape[4]));
        cudnn_attention_release();
    }
    return 0;
}
