/* kernel_names.h — the names of this program's functions by address, also of static ones, which
 * dladdr() does not know. Compilers may give one address several names. */
#ifndef KERNEL_NAMES_H
#define KERNEL_NAMES_H

#include <stdint.h>
#include <map>
#include <string>

namespace cuda_emu {

/* As in the program's symbol table, which is read once. */
const std::multimap<uintptr_t, std::string> &functions(void);

} // namespace cuda_emu

#endif
