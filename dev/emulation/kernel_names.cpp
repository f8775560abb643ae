/* kernel_names.cpp — see kernel_names.h. */
#include "dev/emulation/kernel_names.h"
#include "dev/emulation/cuda_emu.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static std::multimap<uintptr_t, std::string> read_functions(void) {
    std::multimap<uintptr_t, std::string> functions;
    uintptr_t begin = 0; /* where the program was loaded */
    dl_iterate_phdr([](struct dl_phdr_info *info, size_t,
                       void *out) { return *(uintptr_t *)out = info->dlpi_addr, 1; },
                    &begin);
    const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file < 0 || fstat(file, &status)) cuda_emu::fail("cannot read the program's file");
    const char *elf =
        (const char *)mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (elf == MAP_FAILED) cuda_emu::fail("cannot map the program's file");
    const ElfW(Ehdr) *header = (const ElfW(Ehdr) *)elf;
    const ElfW(Shdr) *section = (const ElfW(Shdr) *)(elf + header->e_shoff);
    for (int s = 0; s < header->e_shnum; s++) {
        if (section[s].sh_type != SHT_SYMTAB) continue;
        const ElfW(Sym) *symbol = (const ElfW(Sym) *)(elf + section[s].sh_offset);
        const char *names = elf + section[section[s].sh_link].sh_offset;
        for (size_t i = 0; i < section[s].sh_size / sizeof *symbol; i++)
            if ((symbol[i].st_info & 15) == STT_FUNC)
                functions.insert({begin + symbol[i].st_value, names + symbol[i].st_name});
    }
    munmap((void *)elf, (size_t)status.st_size);
    return functions;
}

const std::multimap<uintptr_t, std::string> &cuda_emu::functions(void) {
    static const std::multimap<uintptr_t, std::string> all = read_functions();
    return all;
}
