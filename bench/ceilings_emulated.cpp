// Compiles the same source for the emulator (GYRE_EMULATED is defined).
#include "bench/ceilings.cu"
