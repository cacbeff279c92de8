// The part of MPI 5.0's standard binary interface that mpi_communicator.cpp uses (MPI: A
// Message-Passing Interface Standard, version 5.0, chapter 20 and appendix A). With it in place of
// a library's own mpi.h the module runs with every library that has this interface,
// libmpi_abi.so.1. What the standard leaves to the library, such as what a handle points to, is not
// needed here.
#pragma once

#include <cstdint>

extern "C" {

using MPI_Op = struct MPI_ABI_Op*;
using MPI_Comm = struct MPI_ABI_Comm*;
using MPI_Info = struct MPI_ABI_Info*;
using MPI_Errhandler = struct MPI_ABI_Errhandler*;
using MPI_Request = struct MPI_ABI_Request*;
using MPI_Datatype = struct MPI_ABI_Datatype*;
using MPI_Status = struct MPI_ABI_Status;  // never read here
using MPI_User_function = void(void* in, void* inout, int* elems, MPI_Datatype* type);

// Handles of predefined objects are numbers. (MPI_Op)0x21 is not a constant expression, so macros, as
// in every mpi.h.
#define MPI_OP_NULL reinterpret_cast<MPI_Op>(std::uintptr_t{0x020})
#define MPI_SUM reinterpret_cast<MPI_Op>(std::uintptr_t{0x021})
#define MPI_COMM_NULL reinterpret_cast<MPI_Comm>(std::uintptr_t{0x100})
#define MPI_COMM_WORLD reinterpret_cast<MPI_Comm>(std::uintptr_t{0x101})
#define MPI_INFO_NULL reinterpret_cast<MPI_Info>(std::uintptr_t{0x130})
#define MPI_ERRORS_RETURN reinterpret_cast<MPI_Errhandler>(std::uintptr_t{0x143})
#define MPI_REQUEST_NULL reinterpret_cast<MPI_Request>(std::uintptr_t{0x180})
#define MPI_DATATYPE_NULL reinterpret_cast<MPI_Datatype>(std::uintptr_t{0x200})
#define MPI_FLOAT reinterpret_cast<MPI_Datatype>(std::uintptr_t{0x210})
#define MPI_DOUBLE reinterpret_cast<MPI_Datatype>(std::uintptr_t{0x214})
#define MPI_BYTE reinterpret_cast<MPI_Datatype>(std::uintptr_t{0x247})
#define MPI_UINT16_T reinterpret_cast<MPI_Datatype>(std::uintptr_t{0x249})
#define MPI_IN_PLACE reinterpret_cast<void*>(std::uintptr_t{1})
#define MPI_STATUS_IGNORE static_cast<MPI_Status*>(nullptr)

constexpr int MPI_SUCCESS = 0;
constexpr int MPI_THREAD_SINGLE = 0, MPI_THREAD_SERIALIZED = 2048;
constexpr int MPI_COMM_TYPE_SHARED = 221;
constexpr int MPI_MAX_ERROR_STRING = 512, MPI_MAX_LIBRARY_VERSION_STRING = 8192;

int MPI_Init(int* argc, char*** argv);
int MPI_Init_thread(int* argc, char*** argv, int required, int* provided);
int MPI_Finalize();
int MPI_Abort(MPI_Comm comm, int code);
int MPI_Get_library_version(char* version, int* length);
int MPI_Error_string(int code, char* text, int* length);

int MPI_Comm_rank(MPI_Comm comm, int* rank);
int MPI_Comm_size(MPI_Comm comm, int* size);
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* copy);
int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* part);
int MPI_Comm_free(MPI_Comm* comm);
int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler);
int MPI_Op_create(MPI_User_function* function, int commutes, MPI_Op* op);
int MPI_Op_free(MPI_Op* op);

int MPI_Iallreduce(const void* in, void* out, int elems, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request* request);
int MPI_Iallgather(const void* in, int in_elems, MPI_Datatype in_type, void* out, int out_elems,
                   MPI_Datatype out_type, MPI_Comm comm, MPI_Request* request);
int MPI_Ialltoallv(const void* in, const int* in_elems, const int* in_offsets, MPI_Datatype in_type,
                   void* out, const int* out_elems, const int* out_offsets, MPI_Datatype out_type,
                   MPI_Comm comm, MPI_Request* request);
int MPI_Ibcast(void* data, int elems, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request* request);
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request);
int MPI_Test(MPI_Request* request, int* done, MPI_Status* status);

}  // extern "C"
