module attributes {hivm.module_core_type = #hivm.module_core_type<MIX>} {
  func.func @_fwd_kernel_fused_4_outlined_merged_vf_0(%arg0: memref<64xf32, #hivm.address_space<ub>>, %arg1: memref<64x64xf32, #hivm.address_space<ub>>, %arg2: memref<64x64xf32, #hivm.address_space<ub>>, %arg3: memref<64x64xf32, #hivm.address_space<ub>>, %arg4: memref<64x64xf16, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function} {
    %0 = llvm.mlir.constant(7 : i32) : i32
    %1 = llvm.mlir.constant(2 : i32) : i32
    %2 = llvm.mlir.constant(8 : i32) : i32
    %3 = llvm.mlir.constant(3 : i32) : i32
    %4 = llvm.mlir.constant(0 : i32) : i32
    %5 = llvm.mlir.constant(64 : i32) : i32
    %6 = llvm.mlir.constant(1 : i32) : i32
    cf.br ^bb1(%4 : i32)
  ^bb1(%7: i32):  // 2 preds: ^bb0, ^bb2
    %8 = arith.cmpi slt, %7, %5 : i32
    cf.cond_br %8, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %base_buffer, %offset, %sizes, %strides = memref.extract_strided_metadata %arg0 : memref<64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%10], sizes: [1], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<1xf32, strided<[1], offset: ?>, #hivm.address_space<ub>>
    %base_buffer_0, %offset_1, %sizes_2:2, %strides_3:2 = memref.extract_strided_metadata %arg1 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast_4 = memref.reinterpret_cast %base_buffer_0 to offset: [%12], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %17 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%16, %4, %4, %4) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %21 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%20, %4, %3, %4) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %22 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %23 = "hivm_regbaseintrins.intr.hivm.vmul.s.x"(%17, %21, %22) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %base_buffer_5, %offset_6, %sizes_7:2, %strides_8:2 = memref.extract_strided_metadata %arg2 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64_9 = arith.constant 64 : index
    %reinterpret_cast_10 = memref.reinterpret_cast %base_buffer_5 to offset: [%24], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %26 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%23, %29, %4, %1, %4, %26) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %30 = arith.addi %7, %6 overflow<nsw> : i32
    cf.br ^bb1(%30 : i32)
  ^bb3:  // pred: ^bb1
    cf.br ^bb4(%4 : i32)
  ^bb4(%31: i32):  // 2 preds: ^bb3, ^bb5
    %32 = arith.cmpi slt, %31, %5 : i32
    cf.cond_br %32, ^bb5, ^bb6
  ^bb5:  // pred: ^bb4
    %base_buffer_11, %offset_12, %sizes_13:2, %strides_14:2 = memref.extract_strided_metadata %arg3 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64_15 = arith.constant 64 : index
    %reinterpret_cast_16 = memref.reinterpret_cast %base_buffer_11 to offset: [%35], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %40 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%39, %4, %4, %4) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %41 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %42 = "hivm_regbaseintrins.intr.hivm.vcvtff.f322f16.x"(%40, %41, %4, %4, %4) : (vector<64xf32>, vector<256xi1>, i32, i32, i32) -> vector<128xf16>
    %base_buffer_17, %offset_18, %sizes_19:2, %strides_20:2 = memref.extract_strided_metadata %arg4 : memref<64x64xf16, #hivm.address_space<ub>> -> memref<f16, #hivm.address_space<ub>>, index, index, index, index, index
    %c64_21 = arith.constant 64 : index
    %reinterpret_cast_22 = memref.reinterpret_cast %base_buffer_17 to offset: [%43], sizes: [64], strides: [1] : memref<f16, #hivm.address_space<ub>> to memref<64xf16, #map, #hivm.address_space<ub>>
    %45 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v128f16"(%42, %48, %4, %0, %4, %45) : (vector<128xf16>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %49 = arith.addi %31, %6 overflow<nsw> : i32
    cf.br ^bb4(%49 : i32)
  ^bb6:  // pred: ^bb4
    return
  }
  func.func @_fwd_kernel_outlined_merged_vf_0(%arg0: memref<64x64xf32, #hivm.address_space<ub>>, %arg1: memref<64xf32, #hivm.address_space<ub>>, %arg2: memref<64xi32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(8 : i32) : i32
    %2 = llvm.mlir.constant(0 : i32) : i32
    %3 = llvm.mlir.constant(0.000000e+00 : f32) : f32
    %4 = llvm.mlir.constant(64 : i32) : i32
    %5 = llvm.mlir.constant(1 : i32) : i32
    %8 = "hivm_regbaseintrins.intr.hivm.vci"(%2, %2) : (i32, i32) -> vector<64xi32>
    %9 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %10 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%2, %9, %5) : (i32, vector<256xi1>, i32) -> vector<64xi32>
    %11 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %12 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%3, %11, %5) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    cf.br ^bb1(%2 : i32)
  ^bb1(%13: i32):  // 2 preds: ^bb0, ^bb2
    %14 = arith.cmpi slt, %13, %4 : i32
    cf.cond_br %14, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %base_buffer, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %arg0 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%17], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %19 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%12, %22, %2, %0, %2, %19) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %23 = arith.addi %13, %5 overflow<nsw> : i32
    cf.br ^bb1(%23 : i32)
  ^bb3:  // pred: ^bb1
    %24 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%12, %25, %2, %0, %2, %24) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %26 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %27 = "hivm_regbaseintrins.intr.hivm.vadd.s.x"(%10, %8, %26) : (vector<64xi32>, vector<64xi32>, vector<256xi1>) -> vector<64xi32>
    %28 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64s32"(%27, %29, %2, %0, %2, %28) : (vector<64xi32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    return
  }
  func.func @_fwd_kernel_fused_0_outlined_vf_0(%arg0: memref<64xi32, #hivm.address_space<ub>>, %arg1: memref<64x64xf32, #hivm.address_space<ub>>, %arg2: f32, %arg3: memref<64x64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(3 : i32) : i32
    %2 = llvm.mlir.constant(8 : i32) : i32
    %3 = llvm.mlir.constant(0xFF800000 : f32) : f32
    %4 = llvm.mlir.constant(0 : i32) : i32
    %5 = llvm.mlir.constant(64 : i32) : i32
    %6 = llvm.mlir.constant(1 : i32) : i32
    %8 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %9 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%3, %8, %6) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    cf.br ^bb1(%4 : i32)
  ^bb1(%10: i32):  // 2 preds: ^bb0, ^bb2
    %11 = arith.cmpi slt, %10, %5 : i32
    cf.cond_br %11, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %base_buffer, %offset, %sizes, %strides = memref.extract_strided_metadata %arg0 : memref<64xi32, #hivm.address_space<ub>> -> memref<i32, #hivm.address_space<ub>>, index, index, index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%13], sizes: [1], strides: [1] : memref<i32, #hivm.address_space<ub>> to memref<1xi32, strided<[1], offset: ?>, #hivm.address_space<ub>>
    %18 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64s32"(%17, %4, %1, %4) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xi32>
    %20 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64s32"(%19, %4, %4, %4) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xi32>
    %base_buffer_0, %offset_1, %sizes_2:2, %strides_3:2 = memref.extract_strided_metadata %arg1 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast_4 = memref.reinterpret_cast %base_buffer_0 to offset: [%21], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %26 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%25, %4, %4, %4) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %27 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %28 = "hivm_regbaseintrins.intr.hivm.vsub.s.x"(%18, %20, %27) : (vector<64xi32>, vector<64xi32>, vector<256xi1>) -> vector<64xi32>
    %29 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %30 = "hivm_regbaseintrins.intr.hivm.vcvtif.s322f32.x"(%28, %29, %4) : (vector<64xi32>, vector<256xi1>, i32) -> vector<64xf32>
    %31 = "hivm_regbaseintrins.intr.hivm.vbr"(%arg2) : (f32) -> vector<64xf32>
    %32 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %33 = "hivm_regbaseintrins.intr.hivm.vcmp.ge.s.z"(%30, %31, %32) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<256xi1>
    %34 = "hivm_regbaseintrins.intr.hivm.vsel"(%26, %9, %33) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %base_buffer_5, %offset_6, %sizes_7:2, %strides_8:2 = memref.extract_strided_metadata %arg3 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64_9 = arith.constant 64 : index
    %reinterpret_cast_10 = memref.reinterpret_cast %base_buffer_5 to offset: [%35], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %37 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%34, %40, %4, %0, %4, %37) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %41 = arith.addi %10, %6 overflow<nsw> : i32
    cf.br ^bb1(%41 : i32)
  ^bb3:  // pred: ^bb1
    return
  }
  func.func @_fwd_kernel_fused_2_outlined_vf_0(%arg0: memref<64x64xf32, #hivm.address_space<ub>>, %arg1: memref<64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %1 = llvm.mlir.constant(4 : i32) : i32
    %2 = llvm.mlir.constant(64 : i32) : i32
    %3 = llvm.mlir.constant(2147483647 : i32) : i32
    %4 = llvm.mlir.constant(-2139095040 : i32) : i32
    %5 = llvm.mlir.constant(1 : i32) : i32
    %6 = llvm.mlir.constant(0 : i32) : i32
    %7 = llvm.mlir.constant(0xFF800000 : f32) : f32
    %8 = llvm.mlir.constant(8 : i32) : i32
    %9 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %10 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%7, %9, %5) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    %11 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %12 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%6, %11, %5) : (i32, vector<256xi1>, i32) -> vector<64xi32>
    %13 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %14 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%3, %13, %5) : (i32, vector<256xi1>, i32) -> vector<64xi32>
    %15 = "hivm_regbaseintrins.intr.hivm.init.vector.align.data"() : () -> vector<32xi8>
    cf.br ^bb1(%6, %15, %0 : i32, vector<32xi8>, !llvm.ptr<6>)
  ^bb1(%16: i32, %17: vector<32xi8>, %18: !llvm.ptr<6>):  // 2 preds: ^bb0, ^bb2
    %19 = arith.cmpi slt, %16, %2 : i32
    cf.cond_br %19, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %base_buffer, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %arg0 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%22], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %27 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%26, %6, %6, %6) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %29 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %30 = "hivm_regbaseintrins.intr.hivm.vand.x"(%28, %14, %29) : (vector<64xi32>, vector<64xi32>, vector<256xi1>) -> vector<64xi32>
    %31 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %32 = "hivm_regbaseintrins.intr.hivm.vadds.s.x"(%30, %4, %31) : (vector<64xi32>, i32, vector<256xi1>) -> vector<64xi32>
    %33 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %34 = "hivm_regbaseintrins.intr.hivm.vmins.s.x"(%32, %5, %33) : (vector<64xi32>, i32, vector<256xi1>) -> vector<64xi32>
    %35 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %36 = "hivm_regbaseintrins.intr.hivm.vmaxs.s.x"(%34, %6, %35) : (vector<64xi32>, i32, vector<256xi1>) -> vector<64xi32>
    %37 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %38 = "hivm_regbaseintrins.intr.hivm.vcmp.ne.s.z"(%36, %12, %37) : (vector<64xi32>, vector<64xi32>, vector<256xi1>) -> vector<256xi1>
    %39 = "hivm_regbaseintrins.intr.hivm.vsel"(%10, %27, %38) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %base_buffer_0, %offset_1, %sizes_2, %strides_3 = memref.extract_strided_metadata %arg1 : memref<64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index
    %reinterpret_cast_4 = memref.reinterpret_cast %base_buffer_0 to offset: [%21], sizes: [], strides: [] : memref<f32, #hivm.address_space<ub>> to memref<f32, strided<[], offset: ?>, #hivm.address_space<ub>>
    %41 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %42 = "hivm_regbaseintrins.intr.hivm.vcmax.s.x"(%39, %41) : (vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %43 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%5, %6) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %47 = "hivm_regbaseintrins.intr.hivm.vstus.post.f32"(%42, %46, %1, %17) {hivm.is_continuous} : (vector<64xf32>, !llvm.ptr<6>, i32, vector<32xi8>) -> !llvm.struct<(vector<32xi8>, ptr<6>)>
    %50 = arith.addi %16, %5 overflow<nsw> : i32
    cf.br ^bb1(%50, %48, %49 : i32, vector<32xi8>, !llvm.ptr<6>)
  ^bb3:  // pred: ^bb1
    "hivm_regbaseintrins.intr.hivm.vstas"(%17, %18, %6, %6) : (vector<32xi8>, !llvm.ptr<6>, i32, i32) -> ()
    return
  }
  func.func @_fwd_kernel_fused_3_outlined_vf_0(%arg0: memref<64xf32, #hivm.address_space<ub>>, %arg1: memref<64xf32, #hivm.address_space<ub>>, %arg2: memref<64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(8 : i32) : i32
    %2 = llvm.mlir.constant(0 : i32) : i32
    %7 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%6, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %9 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%8, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %10 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %11 = "hivm_regbaseintrins.intr.hivm.vmax.s.x"(%7, %9, %10) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %12 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%11, %13, %2, %0, %2, %12) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    return
  }
  func.func @_fwd_kernel_fused_3_outlined_vf_1(%arg0: memref<64xf32, #hivm.address_space<ub>>, %arg1: memref<64x64xf32, #hivm.address_space<ub>>, %arg2: memref<64x64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(8 : i32) : i32
    %2 = llvm.mlir.constant(3 : i32) : i32
    %3 = llvm.mlir.constant(0 : i32) : i32
    %4 = llvm.mlir.constant(64 : i32) : i32
    %5 = llvm.mlir.constant(1 : i32) : i32
    cf.br ^bb1(%3 : i32)
  ^bb1(%6: i32):  // 2 preds: ^bb0, ^bb2
    %7 = arith.cmpi slt, %6, %4 : i32
    cf.cond_br %7, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %base_buffer, %offset, %sizes, %strides = memref.extract_strided_metadata %arg0 : memref<64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%9], sizes: [1], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<1xf32, strided<[1], offset: ?>, #hivm.address_space<ub>>
    %base_buffer_0, %offset_1, %sizes_2:2, %strides_3:2 = memref.extract_strided_metadata %arg1 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast_4 = memref.reinterpret_cast %base_buffer_0 to offset: [%11], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %16 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%15, %3, %3, %3) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %20 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%19, %3, %2, %3) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %21 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %3) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %22 = "hivm_regbaseintrins.intr.hivm.vexpdif"(%16, %20, %21, %3) : (vector<64xf32>, vector<64xf32>, vector<256xi1>, i32) -> vector<64xf32>
    %base_buffer_5, %offset_6, %sizes_7:2, %strides_8:2 = memref.extract_strided_metadata %arg2 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64_9 = arith.constant 64 : index
    %reinterpret_cast_10 = memref.reinterpret_cast %base_buffer_5 to offset: [%23], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %25 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %3) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%22, %28, %3, %0, %3, %25) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %29 = arith.addi %6, %5 overflow<nsw> : i32
    cf.br ^bb1(%29 : i32)
  ^bb3:  // pred: ^bb1
    return
  }
  func.func @_fwd_kernel_fused_3_outlined_vf_2(%arg0: memref<64x64xf32, #hivm.address_space<ub>>, %arg1: memref<64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %1 = llvm.mlir.constant(4 : i32) : i32
    %2 = llvm.mlir.constant(8 : i32) : i32
    %3 = llvm.mlir.constant(0.000000e+00 : f32) : f32
    %4 = llvm.mlir.constant(0 : i32) : i32
    %5 = llvm.mlir.constant(64 : i32) : i32
    %6 = llvm.mlir.constant(1 : i32) : i32
    %7 = "hivm_regbaseintrins.intr.hivm.init.vector.align.data"() : () -> vector<32xi8>
    cf.br ^bb1(%4, %7, %0 : i32, vector<32xi8>, !llvm.ptr<6>)
  ^bb1(%8: i32, %9: vector<32xi8>, %10: !llvm.ptr<6>):  // 2 preds: ^bb0, ^bb2
    %11 = arith.cmpi slt, %8, %5 : i32
    cf.cond_br %11, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %base_buffer, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %arg0 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%14], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %19 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%18, %4, %4, %4) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %20 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %21 = "hivm_regbaseintrins.intr.hivm.vadds.s.x"(%19, %3, %20) : (vector<64xf32>, f32, vector<256xi1>) -> vector<64xf32>
    %base_buffer_0, %offset_1, %sizes_2, %strides_3 = memref.extract_strided_metadata %arg1 : memref<64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index
    %reinterpret_cast_4 = memref.reinterpret_cast %base_buffer_0 to offset: [%13], sizes: [], strides: [] : memref<f32, #hivm.address_space<ub>> to memref<f32, strided<[], offset: ?>, #hivm.address_space<ub>>
    %23 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %24 = "hivm_regbaseintrins.intr.hivm.vcadd.s.x"(%21, %23) : (vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %25 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%6, %4) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %29 = "hivm_regbaseintrins.intr.hivm.vstus.post.f32"(%24, %28, %1, %9) {hivm.is_continuous} : (vector<64xf32>, !llvm.ptr<6>, i32, vector<32xi8>) -> !llvm.struct<(vector<32xi8>, ptr<6>)>
    %32 = arith.addi %8, %6 overflow<nsw> : i32
    cf.br ^bb1(%32, %30, %31 : i32, vector<32xi8>, !llvm.ptr<6>)
  ^bb3:  // pred: ^bb1
    "hivm_regbaseintrins.intr.hivm.vstas"(%9, %10, %4, %4) : (vector<32xi8>, !llvm.ptr<6>, i32, i32) -> ()
    return
  }
  func.func @_fwd_kernel_fused_4_outlined_vf_0(%arg0: memref<64xf32, #hivm.address_space<ub>>, %arg1: memref<64xf32, #hivm.address_space<ub>>, %arg2: memref<64xf32, #hivm.address_space<ub>>, %arg3: memref<64xf32, #hivm.address_space<ub>>, %arg4: memref<64xf32, #hivm.address_space<ub>>, %arg5: memref<64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(8 : i32) : i32
    %2 = llvm.mlir.constant(0 : i32) : i32
    %10 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%9, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %12 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%11, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %13 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %14 = "hivm_regbaseintrins.intr.hivm.vexpdif"(%10, %12, %13, %2) : (vector<64xf32>, vector<64xf32>, vector<256xi1>, i32) -> vector<64xf32>
    %15 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%14, %16, %2, %0, %2, %15) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %18 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%17, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %20 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%19, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %21 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %22 = "hivm_regbaseintrins.intr.hivm.vmul.s.x"(%18, %14, %21) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %23 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %24 = "hivm_regbaseintrins.intr.hivm.vadd.s.x"(%22, %20, %23) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %25 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%24, %26, %2, %0, %2, %25) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    return
  }
  func.func @_fwd_kernel_fused_6_outlined_vf_0(%arg0: memref<64xi32, #hivm.address_space<ub>>, %arg1: memref<64xf32, #hivm.address_space<ub>>, %arg2: i32, %arg3: f32, %arg4: memref<64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(1 : i32) : i32
    %2 = llvm.mlir.constant(0 : i32) : i32
    %3 = llvm.mlir.constant(8 : i32) : i32
    %4 = llvm.mlir.constant(0.000000e+00 : f32) : f32
    %8 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %9 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%4, %8, %1) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    %11 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64s32"(%10, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xi32>
    %13 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%12, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %14 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %15 = "hivm_regbaseintrins.intr.hivm.vadds.s.x"(%11, %arg2, %14) : (vector<64xi32>, i32, vector<256xi1>) -> vector<64xi32>
    %16 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %17 = "hivm_regbaseintrins.intr.hivm.vcvtif.s322f32.x"(%15, %16, %2) : (vector<64xi32>, vector<256xi1>, i32) -> vector<64xf32>
    %18 = "hivm_regbaseintrins.intr.hivm.vbr"(%arg3) : (f32) -> vector<64xf32>
    %19 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %20 = "hivm_regbaseintrins.intr.hivm.vcmp.lt.s.z"(%17, %18, %19) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<256xi1>
    %21 = "hivm_regbaseintrins.intr.hivm.vsel"(%13, %9, %20) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %22 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%21, %23, %2, %0, %2, %22) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    return
  }
  func.func @_fwd_kernel_fused_7_outlined_vf_0(%arg0: memref<64xf32, #hivm.address_space<ub>>, %arg1: memref<64xi1, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(1 : i32) : i32
    %1 = llvm.mlir.constant(0 : i32) : i32
    %2 = llvm.mlir.constant(8 : i32) : i32
    %3 = llvm.mlir.constant(0.000000e+00 : f32) : f32
    %6 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %1) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %7 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%3, %6, %0) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    %9 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%8, %1, %1, %1) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %10 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %1) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %11 = "hivm_regbaseintrins.intr.hivm.vcmp.eq.s.z"(%9, %7, %10) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<256xi1>
    %12 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%2, %1) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %14 = "hivm_regbaseintrins.intr.hivm.init.vector.align.data"() : () -> vector<32xi8>
    %15 = "hivm_regbaseintrins.intr.hivm.pstu.b32"(%11, %13, %14) : (vector<256xi1>, !llvm.ptr<6>, vector<32xi8>) -> !llvm.struct<(vector<32xi8>, ptr<6>)>
    "hivm_regbaseintrins.intr.hivm.vstas"(%16, %17, %1, %1) : (vector<32xi8>, !llvm.ptr<6>, i32, i32) -> ()
    return
  }
  func.func @_fwd_kernel_fused_7_outlined_vf_1(%arg0: memref<64xi1, #hivm.address_space<ub>>, %arg1: memref<64xf32, #hivm.address_space<ub>>, %arg2: memref<64xf32, #hivm.address_space<ub>>, %arg3: memref<64xf32, #hivm.address_space<ub>>, %arg4: memref<64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(1 : i32) : i32
    %2 = llvm.mlir.constant(0 : i32) : i32
    %3 = llvm.mlir.constant(8 : i32) : i32
    %4 = llvm.mlir.constant(0x7F800000 : f32) : f32
    %5 = llvm.mlir.constant(1.000000e+00 : f32) : f32
    %11 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %12 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%4, %11, %1) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    %13 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %14 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%5, %13, %1) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    %16 = "hivm_regbaseintrins.intr.hivm.plds.b8"(%15, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<256xi1>
    %17 = "hivm_regbaseintrins.intr.hivm.pge.b8"(%2, %2) : (i32, i32) -> vector<256xi1>
    %18 = "hivm_regbaseintrins.intr.hivm.pintlv.b8"(%16, %17) : (vector<256xi1>, vector<256xi1>) -> !llvm.struct<(vector<256xi1>, vector<256xi1>)>
    %20 = "hivm_regbaseintrins.intr.hivm.pintlv.b8"(%19, %17) : (vector<256xi1>, vector<256xi1>) -> !llvm.struct<(vector<256xi1>, vector<256xi1>)>
    %23 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%22, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %24 = "hivm_regbaseintrins.intr.hivm.vsel"(%14, %23, %21) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %25 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%24, %26, %2, %0, %2, %25) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %28 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%27, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %29 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %30 = "hivm_regbaseintrins.intr.hivm.vln.x"(%24, %29) : (vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %31 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %32 = "hivm_regbaseintrins.intr.hivm.vadd.s.x"(%28, %30, %31) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %33 = "hivm_regbaseintrins.intr.hivm.vsel"(%12, %32, %21) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %34 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%33, %35, %2, %0, %2, %34) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    return
  }
  func.func @_fwd_kernel_fused_8_outlined_vf_0(%arg0: memref<64xi1, #hivm.address_space<ub>>, %arg1: memref<64xf32, #hivm.address_space<ub>>, %arg2: memref<64x64xf32, #hivm.address_space<ub>>, %arg3: memref<64x64xf16, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(7 : i32) : i32
    %1 = llvm.mlir.constant(3 : i32) : i32
    %2 = llvm.mlir.constant(8 : index) : i64
    %3 = llvm.mlir.constant(0.000000e+00 : f32) : f32
    %4 = llvm.mlir.constant(-1.000000e+00 : f16) : f16
    %5 = llvm.mlir.constant(0.000000e+00 : f16) : f16
    %6 = llvm.mlir.constant(1.000000e+00 : f16) : f16
    %7 = llvm.mlir.constant(1 : index) : i64
    %8 = llvm.mlir.constant(1 : i32) : i32
    %9 = llvm.mlir.constant(64 : i32) : i32
    %10 = llvm.mlir.constant(0 : i32) : i32
    %11 = llvm.mlir.constant(1 : i8) : i8
    %12 = llvm.mlir.constant(0 : i8) : i8
    %13 = llvm.mlir.constant(8 : i32) : i32
    %14 = llvm.mlir.constant(256 : i32) : i32
    %15 = llvm.mlir.constant(0 : index) : i64
    %17 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %18 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%3, %17, %8) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    %19 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %20 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%4, %19, %8) : (f16, vector<256xi1>, i32) -> vector<128xf16>
    %21 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %22 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%5, %21, %8) : (f16, vector<256xi1>, i32) -> vector<128xf16>
    %23 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %24 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%5, %23, %8) : (f16, vector<256xi1>, i32) -> vector<128xf16>
    %25 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%8, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %26 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%6, %25, %8) : (f16, vector<256xi1>, i32) -> vector<128xf16>
    cf.br ^bb1(%10 : i32)
  ^bb1(%27: i32):  // 2 preds: ^bb0, ^bb2
    %28 = arith.cmpi slt, %27, %9 : i32
    cf.cond_br %28, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %base_buffer, %offset, %sizes, %strides = memref.extract_strided_metadata %arg1 : memref<64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%30], sizes: [1], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<1xf32, strided<[1], offset: ?>, #hivm.address_space<ub>>
    %base_buffer_0, %offset_1, %sizes_2, %strides_3 = memref.extract_strided_metadata %arg0 : memref<64xi1, #hivm.address_space<ub>> -> memref<i1, #hivm.address_space<ub>>, index, index, index
    %reinterpret_cast_4 = memref.reinterpret_cast %base_buffer_0 to offset: [%16], sizes: [1], strides: [1] : memref<i1, #hivm.address_space<ub>> to memref<1xi1, strided<[1], offset: ?>, #hivm.address_space<ub>>
    %34 = llvm.sdiv %33, %14  : i32
    %35 = llvm.mul %34, %14 : i32
    %36 = llvm.sub %33, %35 : i32
    %37 = llvm.sdiv %35, %13  : i32
    %42 = llvm.udiv %41, %2  : i64
    %45 = "hivm_regbaseintrins.intr.hivm.plds.b8"(%44, %10, %10, %10) : (!llvm.ptr<6>, i32, i32, i32) -> vector<256xi1>
    %46 = "hivm_regbaseintrins.intr.hivm.pge.b8"(%10, %10) {mask_bit_width = 8 : i32} : (i32, i32) -> vector<256xi1>
    %47 = "hivm_regbaseintrins.intr.hivm.vbr"(%12) : (i8) -> vector<256xi8>
    %48 = "hivm_regbaseintrins.intr.hivm.vbr"(%11) : (i8) -> vector<256xi8>
    %49 = "hivm_regbaseintrins.intr.hivm.vsel"(%48, %47, %45) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %50 = llvm.add %39, %7 : i64
    %52 = "hivm_regbaseintrins.intr.hivm.plt.b8.v300"(%51) : (i32) -> !llvm.struct<(vector<256xi1>, i32)>
    %55 = "hivm_regbaseintrins.intr.hivm.plt.b8.v300"(%54) : (i32) -> !llvm.struct<(vector<256xi1>, i32)>
    %57 = "hivm_regbaseintrins.intr.hivm.pxor.z"(%53, %56, %46) : (vector<256xi1>, vector<256xi1>, vector<256xi1>) -> vector<256xi1>
    %58 = "hivm_regbaseintrins.intr.hivm.pge.b8"(%10, %10) {mask_bit_width = 8 : i32} : (i32, i32) -> vector<256xi1>
    %59 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%12, %58, %8) : (i8, vector<256xi1>, i32) -> vector<256xi8>
    %60 = "hivm_regbaseintrins.intr.hivm.vor.x"(%49, %59, %57) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %61 = "hivm_regbaseintrins.intr.hivm.pge.b8"(%10, %10) {mask_bit_width = 8 : i32} : (i32, i32) -> vector<256xi1>
    %62 = "hivm_regbaseintrins.intr.hivm.vintlv"(%60, %59) : (vector<256xi8>, vector<256xi8>) -> !llvm.struct<(vector<256xi8>, vector<256xi8>)>
    %65 = "hivm_regbaseintrins.intr.hivm.vxor.x"(%63, %64, %61) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %66 = "hivm_regbaseintrins.intr.hivm.vintlv"(%65, %59) : (vector<256xi8>, vector<256xi8>) -> !llvm.struct<(vector<256xi8>, vector<256xi8>)>
    %69 = "hivm_regbaseintrins.intr.hivm.vxor.x"(%67, %68, %61) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %70 = "hivm_regbaseintrins.intr.hivm.vintlv"(%69, %59) : (vector<256xi8>, vector<256xi8>) -> !llvm.struct<(vector<256xi8>, vector<256xi8>)>
    %73 = "hivm_regbaseintrins.intr.hivm.vxor.x"(%71, %72, %61) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %74 = "hivm_regbaseintrins.intr.hivm.vintlv"(%73, %59) : (vector<256xi8>, vector<256xi8>) -> !llvm.struct<(vector<256xi8>, vector<256xi8>)>
    %77 = "hivm_regbaseintrins.intr.hivm.vxor.x"(%75, %76, %61) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %78 = "hivm_regbaseintrins.intr.hivm.vintlv"(%77, %59) : (vector<256xi8>, vector<256xi8>) -> !llvm.struct<(vector<256xi8>, vector<256xi8>)>
    %81 = "hivm_regbaseintrins.intr.hivm.vxor.x"(%79, %80, %61) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %82 = "hivm_regbaseintrins.intr.hivm.vintlv"(%81, %59) : (vector<256xi8>, vector<256xi8>) -> !llvm.struct<(vector<256xi8>, vector<256xi8>)>
    %85 = "hivm_regbaseintrins.intr.hivm.vxor.x"(%83, %84, %61) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %86 = "hivm_regbaseintrins.intr.hivm.vintlv"(%85, %59) : (vector<256xi8>, vector<256xi8>) -> !llvm.struct<(vector<256xi8>, vector<256xi8>)>
    %89 = "hivm_regbaseintrins.intr.hivm.vxor.x"(%87, %88, %61) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %90 = "hivm_regbaseintrins.intr.hivm.vintlv"(%89, %59) : (vector<256xi8>, vector<256xi8>) -> !llvm.struct<(vector<256xi8>, vector<256xi8>)>
    %93 = "hivm_regbaseintrins.intr.hivm.vxor.x"(%91, %92, %61) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi8>
    %94 = "hivm_regbaseintrins.intr.hivm.vdup.z"(%93, %46, %8) : (vector<256xi8>, vector<256xi1>, i32) -> vector<256xi8>
    %95 = "hivm_regbaseintrins.intr.hivm.vcmp.ne.s.z"(%94, %47, %46) : (vector<256xi8>, vector<256xi8>, vector<256xi1>) -> vector<256xi1>
    %96 = "hivm_regbaseintrins.intr.hivm.punpack"(%95, %10) : (vector<256xi1>, i32) -> vector<256xi1>
    %97 = "hivm_regbaseintrins.intr.hivm.punpack"(%96, %10) : (vector<256xi1>, i32) -> vector<256xi1>
    %98 = "hivm_regbaseintrins.intr.hivm.vsel"(%26, %24, %97) : (vector<128xf16>, vector<128xf16>, vector<256xi1>) -> vector<128xf16>
    %99 = builtin.unrealized_conversion_cast %98 : vector<128xf16> to vector<1xf16>
    %100 = builtin.unrealized_conversion_cast %99 : vector<1xf16> to vector<64xf16>
    %101 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %102 = builtin.unrealized_conversion_cast %100 : vector<64xf16> to vector<128xf16>
    %103 = "hivm_regbaseintrins.intr.hivm.vdup.z"(%102, %101, %8) : (vector<128xf16>, vector<256xi1>, i32) -> vector<128xf16>
    %104 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %105 = "hivm_regbaseintrins.intr.hivm.vcmp.ne.s.z"(%103, %22, %104) : (vector<128xf16>, vector<128xf16>, vector<256xi1>) -> vector<256xi1>
    %base_buffer_5, %offset_6, %sizes_7:2, %strides_8:2 = memref.extract_strided_metadata %arg2 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast_9 = memref.reinterpret_cast %base_buffer_5 to offset: [%106], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %111 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%110, %10, %10, %10) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %115 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%114, %10, %1, %10) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %116 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %117 = "hivm_regbaseintrins.intr.hivm.vdiv.s.x"(%111, %115, %116) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %118 = "hivm_regbaseintrins.intr.hivm.vsel"(%20, %22, %105) : (vector<128xf16>, vector<128xf16>, vector<256xi1>) -> vector<128xf16>
    %119 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %120 = "hivm_regbaseintrins.intr.hivm.vcmp.ne.s.z"(%118, %22, %119) : (vector<128xf16>, vector<128xf16>, vector<256xi1>) -> vector<256xi1>
    %121 = "hivm_regbaseintrins.intr.hivm.vsel"(%18, %117, %120) : (vector<64xf32>, vector<64xf32>, vector<256xi1>) -> vector<64xf32>
    %122 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %123 = "hivm_regbaseintrins.intr.hivm.vcvtff.f322f16.x"(%121, %122, %10, %10, %10) : (vector<64xf32>, vector<256xi1>, i32, i32, i32) -> vector<128xf16>
    %base_buffer_10, %offset_11, %sizes_12:2, %strides_13:2 = memref.extract_strided_metadata %arg3 : memref<64x64xf16, #hivm.address_space<ub>> -> memref<f16, #hivm.address_space<ub>>, index, index, index, index, index
    %c64_14 = arith.constant 64 : index
    %reinterpret_cast_15 = memref.reinterpret_cast %base_buffer_10 to offset: [%124], sizes: [64], strides: [1] : memref<f16, #hivm.address_space<ub>> to memref<64xf16, #map, #hivm.address_space<ub>>
    %126 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%13, %10) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v128f16"(%123, %129, %10, %0, %10, %126) : (vector<128xf16>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %130 = arith.addi %27, %8 overflow<nsw> : i32
    cf.br ^bb1(%130 : i32)
  ^bb3:  // pred: ^bb1
    return
  }
  func.func @_fwd_kernel_outlined_vf_0(%arg0: memref<64x64xf16, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(8 : i32) : i32
    %1 = llvm.mlir.constant(1 : i32) : i32
    %2 = llvm.mlir.constant(64 : i32) : i32
    %3 = llvm.mlir.constant(0 : i32) : i32
    %4 = llvm.mlir.constant(0.000000e+00 : f16) : f16
    %5 = llvm.mlir.constant(9 : i32) : i32
    %6 = "hivm_regbaseintrins.intr.hivm.pge.b16"(%5, %3) {mask_bit_width = 16 : i32} : (i32, i32) -> vector<256xi1>
    %7 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%4, %6, %1) : (f16, vector<256xi1>, i32) -> vector<128xf16>
    cf.br ^bb1(%3 : i32)
  ^bb1(%8: i32):  // 2 preds: ^bb0, ^bb2
    %9 = arith.cmpi slt, %8, %2 : i32
    cf.cond_br %9, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %12 = "hivm_regbaseintrins.intr.hivm.pge.b16"(%0, %3) {mask_bit_width = 16 : i32, mask_op_idx = 0 : i32} : (i32, i32) -> vector<256xi1>
    %base_buffer, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %arg0 : memref<64x64xf16, #hivm.address_space<ub>> -> memref<f16, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%13], sizes: [64], strides: [1] : memref<f16, #hivm.address_space<ub>> to memref<64xf16, #map, #hivm.address_space<ub>>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v128f16"(%7, %17, %3, %1, %3, %12) : (vector<128xf16>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %18 = arith.addi %8, %1 overflow<nsw> : i32
    cf.br ^bb1(%18 : i32)
  ^bb3:  // pred: ^bb1
    return
  }
  func.func @_fwd_kernel_outlined_vf_1(%arg0: memref<64x64xf16, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(8 : i32) : i32
    %1 = llvm.mlir.constant(1 : i32) : i32
    %2 = llvm.mlir.constant(64 : i32) : i32
    %3 = llvm.mlir.constant(0 : i32) : i32
    %4 = llvm.mlir.constant(0.000000e+00 : f16) : f16
    %5 = llvm.mlir.constant(9 : i32) : i32
    %6 = "hivm_regbaseintrins.intr.hivm.pge.b16"(%5, %3) {mask_bit_width = 16 : i32} : (i32, i32) -> vector<256xi1>
    %7 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%4, %6, %1) : (f16, vector<256xi1>, i32) -> vector<128xf16>
    cf.br ^bb1(%3 : i32)
  ^bb1(%8: i32):  // 2 preds: ^bb0, ^bb2
    %9 = arith.cmpi slt, %8, %2 : i32
    cf.cond_br %9, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %12 = "hivm_regbaseintrins.intr.hivm.pge.b16"(%0, %3) {mask_bit_width = 16 : i32, mask_op_idx = 0 : i32} : (i32, i32) -> vector<256xi1>
    %base_buffer, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %arg0 : memref<64x64xf16, #hivm.address_space<ub>> -> memref<f16, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%13], sizes: [64], strides: [1] : memref<f16, #hivm.address_space<ub>> to memref<64xf16, #map, #hivm.address_space<ub>>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v128f16"(%7, %17, %3, %1, %3, %12) : (vector<128xf16>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %18 = arith.addi %8, %1 overflow<nsw> : i32
    cf.br ^bb1(%18 : i32)
  ^bb3:  // pred: ^bb1
    return
  }
  func.func @_fwd_kernel_outlined_vf_2(%arg0: memref<64x64xf16, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(8 : i32) : i32
    %1 = llvm.mlir.constant(1 : i32) : i32
    %2 = llvm.mlir.constant(64 : i32) : i32
    %3 = llvm.mlir.constant(0 : i32) : i32
    %4 = llvm.mlir.constant(0.000000e+00 : f16) : f16
    %5 = llvm.mlir.constant(9 : i32) : i32
    %6 = "hivm_regbaseintrins.intr.hivm.pge.b16"(%5, %3) {mask_bit_width = 16 : i32} : (i32, i32) -> vector<256xi1>
    %7 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%4, %6, %1) : (f16, vector<256xi1>, i32) -> vector<128xf16>
    cf.br ^bb1(%3 : i32)
  ^bb1(%8: i32):  // 2 preds: ^bb0, ^bb2
    %9 = arith.cmpi slt, %8, %2 : i32
    cf.cond_br %9, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %12 = "hivm_regbaseintrins.intr.hivm.pge.b16"(%0, %3) {mask_bit_width = 16 : i32, mask_op_idx = 0 : i32} : (i32, i32) -> vector<256xi1>
    %base_buffer, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %arg0 : memref<64x64xf16, #hivm.address_space<ub>> -> memref<f16, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%13], sizes: [64], strides: [1] : memref<f16, #hivm.address_space<ub>> to memref<64xf16, #map, #hivm.address_space<ub>>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v128f16"(%7, %17, %3, %1, %3, %12) : (vector<128xf16>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %18 = arith.addi %8, %1 overflow<nsw> : i32
    cf.br ^bb1(%18 : i32)
  ^bb3:  // pred: ^bb1
    return
  }
  func.func @_fwd_kernel_outlined_vf_3(%arg0: memref<64x64xf32, #hivm.address_space<ub>>, %arg1: f32, %arg2: memref<64x64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(8 : i32) : i32
    %2 = llvm.mlir.constant(0 : i32) : i32
    %3 = llvm.mlir.constant(64 : i32) : i32
    %4 = llvm.mlir.constant(1 : i32) : i32
    cf.br ^bb1(%2 : i32)
  ^bb1(%5: i32):  // 2 preds: ^bb0, ^bb2
    %6 = arith.cmpi slt, %5, %3 : i32
    cf.cond_br %6, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %base_buffer, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %arg0 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64 = arith.constant 64 : index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%9], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %14 = "hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%13, %2, %2, %2) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>
    %15 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %16 = "hivm_regbaseintrins.intr.hivm.vmuls.s.x"(%14, %arg1, %15) : (vector<64xf32>, f32, vector<256xi1>) -> vector<64xf32>
    %base_buffer_0, %offset_1, %sizes_2:2, %strides_3:2 = memref.extract_strided_metadata %arg2 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %c64_4 = arith.constant 64 : index
    %reinterpret_cast_5 = memref.reinterpret_cast %base_buffer_0 to offset: [%17], sizes: [64], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<64xf32, #map, #hivm.address_space<ub>>
    %19 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%1, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%16, %22, %2, %0, %2, %19) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    %23 = arith.addi %5, %4 overflow<nsw> : i32
    cf.br ^bb1(%23 : i32)
  ^bb3:  // pred: ^bb1
    return
  }
  func.func @_fwd_kernel_outlined_vf_4(%arg0: memref<64xf32, #hivm.address_space<ub>>) attributes {hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.vector_function, no_inline} {
    %0 = llvm.mlir.constant(2 : i32) : i32
    %1 = llvm.mlir.constant(1 : i32) : i32
    %2 = llvm.mlir.constant(0 : i32) : i32
    %3 = llvm.mlir.constant(8 : i32) : i32
    %4 = llvm.mlir.constant(-3.40282347E+38 : f32) : f32
    %6 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    %7 = "hivm_regbaseintrins.intr.hivm.vdups.z"(%4, %6, %1) : (f32, vector<256xi1>, i32) -> vector<64xf32>
    %8 = "hivm_regbaseintrins.intr.hivm.pge.b32"(%3, %2) {mask_bit_width = 32 : i32} : (i32, i32) -> vector<256xi1>
    "hivm_regbaseintrins.intr.hivm.vstsx1.v64f32"(%7, %9, %2, %0, %2, %8) : (vector<64xf32>, !llvm.ptr<6>, i32, i32, i32, vector<256xi1>) -> ()
    return
  }
  func.func @_fwd_kernel_mix_aic(%arg0: i64 {hacc.arg_type = #hacc.arg_type<ffts_base_address>}, %arg1: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<sync_block_lock>}, %arg2: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<workspace>}, %arg3: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg4: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg5: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg6: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg7: memref<?xf32, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg8: i32, %arg9: i32, %arg10: i32, %arg11: i32, %arg12: i32, %arg13: i32, %arg14: i32, %arg15: i32, %arg16: i32, %arg17: i32, %arg18: i32, %arg19: i32, %arg20: i32, %arg21: i32, %arg22: i32, %arg23: i32, %arg24: f32, %arg25: f32, %arg26: f32, %arg27: f32, %arg28: f32, %arg29: f32, %arg30: f32, %arg31: f32, %arg32: i32, %arg33: i32, %arg34: i32, %arg35: i32, %arg36: i32, %arg37: i32, %arg38: i32, %arg39: i32, %arg40: i32, %arg41: i32, %arg42: i32, %arg43: i32) attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, func_dyn_memref_args = dense<[false, true, true, true, true, true, true, true, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false]> : vector<44xi1>, hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<AIC>, hivm.part_of_mix, hivm.vf_mode = #hivm.vf_mode<SIMD>, hivm_regbaseintrins.target = #hivm_regbaseintrins.target<"dav-c310">, parallel_mode = "simd"} {
    %0 = llvm.mlir.constant(32768 : i64) : i64
    %1 = llvm.mlir.constant(0 : i64) : i64
    %2 = llvm.mlir.constant(16384 : i64) : i64
    %3 = llvm.mlir.constant(49152 : i64) : i64
    %4 = llvm.mlir.constant(8192 : i64) : i64
    %5 = llvm.mlir.constant(40960 : i64) : i64
    %6 = llvm.mlir.constant(-1 : i64) : i64
    %7 = llvm.mlir.constant(3 : i64) : i64
    %8 = llvm.mlir.constant(5 : i64) : i64
    %9 = llvm.mlir.constant(4 : i64) : i64
    %10 = llvm.mlir.constant(1 : i64) : i64
    %11 = llvm.mlir.constant(2 : i64) : i64
    %12 = llvm.mlir.constant(true) : i1
    %13 = llvm.mlir.constant(64 : index) : i64
    %14 = llvm.mlir.constant(0 : i32) : i32
    %15 = llvm.mlir.constant(64 : i32) : i32
    %16 = llvm.mlir.constant(63 : i32) : i32
    %17 = llvm.mlir.constant(33280 : i64) : i64
    %18 = llvm.mlir.constant(24576 : i64) : i64
    %19 = llvm.mlir.constant(116224 : i64) : i64
    %20 = llvm.mlir.constant(1.000000e+00 : f32) : f32
    %21 = llvm.mlir.constant(false) : i1
    %22 = llvm.mlir.constant(0 : i8) : i8
    %23 = llvm.mlir.constant(0 : index) : i64
    %26 = hivm.hir.pointer_cast(%1) : memref<4x4x16x16xf32, #hivm.address_space<cc>>
    %28 = hivm.hir.pointer_cast(%0) : memref<4x4x16x16xf32, #hivm.address_space<cc>>
    %30 = hivm.hir.pointer_cast(%1) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %32 = hivm.hir.pointer_cast(%0) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %34 = hivm.hir.pointer_cast(%2) : memref<4x4x16x16xf32, #hivm.address_space<cc>>
    %36 = hivm.hir.pointer_cast(%3) : memref<4x4x16x16xf32, #hivm.address_space<cc>>
    %38 = hivm.hir.pointer_cast(%2) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %40 = hivm.hir.pointer_cast(%3) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %42 = hivm.hir.pointer_cast(%4) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %44 = hivm.hir.pointer_cast(%5) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %alloca = memref.alloca() {hivm.multi_buffer_counter_for = 1 : i64} : memref<1xi64>
    memref.store %1, %alloca[%24] : memref<1xi64>
    %alloca_0 = memref.alloca() {hivm.multi_buffer_counter_for = 0 : i64} : memref<1xi64>
    memref.store %1, %alloca_0[%24] : memref<1xi64>
    %46 = hivm.hir.get_block_idx -> i64
    %48 = llvm.srem %47, %arg41  : i32
    %49 = llvm.sdiv %arg33, %arg34  : i32
    %50 = llvm.add %arg35, %16 : i32
    %51 = llvm.sdiv %50, %15  : i32
    %52 = llvm.mul %51, %arg33 : i32
    %53 = llvm.mul %52, %arg32 : i32
    %54 = llvm.sub %arg36, %arg35 : i32
    cf.br ^bb1(%48 : i32)
  ^bb1(%71: i32):  // 2 preds: ^bb0, ^bb5
    %72 = arith.cmpi slt, %71, %53 : i32
    cf.cond_br %72, ^bb2, ^bb6
  ^bb2:  // pred: ^bb1
    %73 = memref.load %alloca[%24] {markDCacheInvalidatePatternVisited = 0 : i32} : memref<1xi64>
    %74 = llvm.urem %73, %11  : i64
    %75 = llvm.icmp "eq" %74, %10 : i64
    %76 = llvm.select %75, %33, %31 : i1, !llvm.struct<(ptr<2>, ptr<2>, i64, array<4 x i64>, array<4 x i64>)>
    %77 = builtin.unrealized_conversion_cast %76 : !llvm.struct<(ptr<2>, ptr<2>, i64, array<4 x i64>, array<4 x i64>)> to memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %79 = llvm.xor %78, %12  : i1
    %81 = llvm.sdiv %71, %51  : i32
    %82 = llvm.sdiv %81, %arg33  : i32
    %83 = llvm.srem %81, %arg33  : i32
    %84 = llvm.srem %71, %51  : i32
    %85 = llvm.mul %84, %15 : i32
    %86 = llvm.sdiv %83, %49  : i32
    %87 = llvm.add %85, %15 : i32
    %88 = llvm.add %87, %54 : i32
    %89 = llvm.intr.smin(%arg36, %88)  : (i32, i32) -> i32
    %91 = llvm.mul %90, %55 : i64
    %93 = llvm.mul %92, %56 : i64
    %94 = llvm.add %91, %93 : i64
    %97 = llvm.mul %96, %57 : i64
    %98 = llvm.mul %92, %58 : i64
    %99 = llvm.add %97, %98 : i64
    %101 = llvm.mul %96, %59 : i64
    %102 = llvm.mul %92, %60 : i64
    %103 = llvm.add %101, %102 : i64
    %108 = arith.addi %95, %107 : index
    %c-1 = arith.constant -1 : index
    %110 = arith.addi %64, %109 : index
    %111 = builtin.unrealized_conversion_cast %110 : index to i64
    %112 = llvm.intr.smax(%111, %23)  : (i64, i64) -> i64
    %113 = llvm.intr.smin(%112, %13)  : (i64, i64) -> i64
    %base_buffer, %offset, %sizes, %strides = memref.extract_strided_metadata %arg3 : memref<?xf16, #hivm.address_space<gm>> -> memref<f16, #hivm.address_space<gm>>, index, index, index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%108], sizes: [%114, 64], strides: [%62, 1] : memref<f16, #hivm.address_space<gm>> to memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
    %c15 = arith.constant 15 : index
    %115 = arith.addi %114, %c15 : index
    %c16 = arith.constant 16 : index
    %c0 = arith.constant 0 : index
    %c-1_1 = arith.constant -1 : index
    %116 = arith.cmpi slt, %115, %c0 : index
    %117 = arith.subi %c-1_1, %115 : index
    %118 = arith.select %116, %117, %115 : index
    %120 = arith.subi %c-1_1, %119 : index
    %121 = arith.select %116, %120, %119 : index
    %base_buffer_2, %offset_3, %sizes_4:4, %strides_5:4 = memref.extract_strided_metadata %77 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> -> memref<f16, #hivm.address_space<cbuf>>, index, index, index, index, index, index, index, index, index
    %reinterpret_cast_6 = memref.reinterpret_cast %base_buffer_2 to offset: [0], sizes: [4, %121, 16, 16], strides: [1024, 256, 16, 1] : memref<f16, #hivm.address_space<cbuf>> to memref<4x?x16x16xf16, strided<[1024, 256, 16, 1]>, #hivm.address_space<cbuf>>
    %cast = memref.cast %reinterpret_cast : memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
    %cast_7 = memref.cast %reinterpret_cast_6 : memref<4x?x16x16xf16, strided<[1024, 256, 16, 1]>, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
    call @nd2nz_half(%cast, %cast_7) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
    cf.br ^bb3(%14, %14, %14 : i32, i32, i32)
  ^bb3(%122: i32, %123: i32, %124: i32):  // 2 preds: ^bb2, ^bb4
    %125 = arith.cmpi slt, %122, %89 : i32
    cf.cond_br %125, ^bb4, ^bb5
  ^bb4:  // pred: ^bb3
    %126 = memref.load %alloca_0[%24] {markDCacheInvalidatePatternVisited = 0 : i32} : memref<1xi64>
    %127 = llvm.urem %126, %11  : i64
    %128 = llvm.icmp "eq" %127, %10 : i64
    %129 = llvm.select %128, %29, %27 : i1, !llvm.struct<(ptr<5>, ptr<5>, i64, array<4 x i64>, array<4 x i64>)>
    %130 = builtin.unrealized_conversion_cast %129 : !llvm.struct<(ptr<5>, ptr<5>, i64, array<4 x i64>, array<4 x i64>)> to memref<4x4x16x16xf32, #hivm.address_space<cc>>
    %131 = llvm.select %128, %37, %35 : i1, !llvm.struct<(ptr<5>, ptr<5>, i64, array<4 x i64>, array<4 x i64>)>
    %132 = builtin.unrealized_conversion_cast %131 : !llvm.struct<(ptr<5>, ptr<5>, i64, array<4 x i64>, array<4 x i64>)> to memref<4x4x16x16xf32, #hivm.address_space<cc>>
    %133 = llvm.select %128, %41, %39 : i1, !llvm.struct<(ptr<2>, ptr<2>, i64, array<4 x i64>, array<4 x i64>)>
    %134 = builtin.unrealized_conversion_cast %133 : !llvm.struct<(ptr<2>, ptr<2>, i64, array<4 x i64>, array<4 x i64>)> to memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %135 = llvm.select %128, %45, %43 : i1, !llvm.struct<(ptr<2>, ptr<2>, i64, array<4 x i64>, array<4 x i64>)>
    %136 = builtin.unrealized_conversion_cast %135 : !llvm.struct<(ptr<2>, ptr<2>, i64, array<4 x i64>, array<4 x i64>)> to memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %138 = llvm.select %137, %9, %8 : i1, i64
    %139 = llvm.xor %137, %12  : i1
    %141 = llvm.select %137, %11, %7 : i1, i64
    %145 = arith.addi %104, %144 : index
    %149 = arith.addi %100, %148 : index
    %c-1_8 = arith.constant -1 : index
    %151 = arith.addi %68, %150 : index
    %152 = builtin.unrealized_conversion_cast %151 : index to i64
    %153 = llvm.intr.smax(%152, %23)  : (i64, i64) -> i64
    %154 = llvm.intr.smin(%153, %13)  : (i64, i64) -> i64
    %base_buffer_9, %offset_10, %sizes_11, %strides_12 = memref.extract_strided_metadata %arg4 : memref<?xf16, #hivm.address_space<gm>> -> memref<f16, #hivm.address_space<gm>>, index, index, index
    %reinterpret_cast_13 = memref.reinterpret_cast %base_buffer_9 to offset: [%149], sizes: [%155, 64], strides: [%70, 1] : memref<f16, #hivm.address_space<gm>> to memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
    %c15_14 = arith.constant 15 : index
    %156 = arith.addi %155, %c15_14 : index
    %c16_15 = arith.constant 16 : index
    %c0_16 = arith.constant 0 : index
    %c-1_17 = arith.constant -1 : index
    %157 = arith.cmpi slt, %156, %c0_16 : index
    %158 = arith.subi %c-1_17, %156 : index
    %159 = arith.select %157, %158, %156 : index
    %161 = arith.subi %c-1_17, %160 : index
    %162 = arith.select %157, %161, %160 : index
    %base_buffer_18, %offset_19, %sizes_20:4, %strides_21:4 = memref.extract_strided_metadata %136 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> -> memref<f16, #hivm.address_space<cbuf>>, index, index, index, index, index, index, index, index, index
    %reinterpret_cast_22 = memref.reinterpret_cast %base_buffer_18 to offset: [0], sizes: [4, %162, 16, 16], strides: [1024, 256, 16, 1] : memref<f16, #hivm.address_space<cbuf>> to memref<4x?x16x16xf16, strided<[1024, 256, 16, 1]>, #hivm.address_space<cbuf>>
    %cast_23 = memref.cast %reinterpret_cast_13 : memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
    %cast_24 = memref.cast %reinterpret_cast_22 : memref<4x?x16x16xf16, strided<[1024, 256, 16, 1]>, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
    call @nd2nz_half(%cast_23, %cast_24) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
    %cast_25 = memref.cast %77 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
    %cast_26 = memref.cast %136 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
    %cast_27 = memref.cast %130 : memref<4x4x16x16xf32, #hivm.address_space<cc>> to memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
    call @mma_tile_half_to_float_tb(%cast_25, %cast_26, %12, %25, %25, %25, %cast_27, %6, %1, %6, %141, %6, %6, %6, %22) : (memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, i1, index, index, index, memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, i64, i64, i64, i64, i64, i64, i64, i8) -> ()
    %163 = hivm.hir.pointer_cast(%17) : memref<64x64xf32, #hivm.address_space<ub>>
    %cast_28 = memref.cast %130 : memref<4x4x16x16xf32, #hivm.address_space<cc>> to memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
    %cast_29 = memref.cast %163 : memref<64x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    call @fixpipe_nz2nd_float_to_float_4d_to_2d_ubuf(%cast_28, %cast_29, %1, %20, %1, %21, %22) : (memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, i64, f32, i64, i1, i8) -> ()
    %c-1_30 = arith.constant -1 : index
    %165 = arith.addi %68, %164 : index
    %166 = builtin.unrealized_conversion_cast %165 : index to i64
    %167 = llvm.intr.smax(%166, %23)  : (i64, i64) -> i64
    %168 = llvm.intr.smin(%167, %13)  : (i64, i64) -> i64
    %base_buffer_31, %offset_32, %sizes_33, %strides_34 = memref.extract_strided_metadata %arg5 : memref<?xf16, #hivm.address_space<gm>> -> memref<f16, #hivm.address_space<gm>>, index, index, index
    %reinterpret_cast_35 = memref.reinterpret_cast %base_buffer_31 to offset: [%145], sizes: [%169, 64], strides: [%66, 1] : memref<f16, #hivm.address_space<gm>> to memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
    %c15_36 = arith.constant 15 : index
    %170 = arith.addi %169, %c15_36 : index
    %c16_37 = arith.constant 16 : index
    %c0_38 = arith.constant 0 : index
    %c-1_39 = arith.constant -1 : index
    %171 = arith.cmpi slt, %170, %c0_38 : index
    %172 = arith.subi %c-1_39, %170 : index
    %173 = arith.select %171, %172, %170 : index
    %175 = arith.subi %c-1_39, %174 : index
    %176 = arith.select %171, %175, %174 : index
    %base_buffer_40, %offset_41, %sizes_42:4, %strides_43:4 = memref.extract_strided_metadata %134 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> -> memref<f16, #hivm.address_space<cbuf>>, index, index, index, index, index, index, index, index, index
    %reinterpret_cast_44 = memref.reinterpret_cast %base_buffer_40 to offset: [0], sizes: [4, %176, 16, 16], strides: [1024, 256, 16, 1] : memref<f16, #hivm.address_space<cbuf>> to memref<4x?x16x16xf16, strided<[1024, 256, 16, 1]>, #hivm.address_space<cbuf>>
    %cast_45 = memref.cast %reinterpret_cast_35 : memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
    %cast_46 = memref.cast %reinterpret_cast_44 : memref<4x?x16x16xf16, strided<[1024, 256, 16, 1]>, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
    call @nd2nz_half(%cast_45, %cast_46) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
    %177 = hivm.hir.pointer_cast(%18) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %cast_47 = memref.cast %177 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
    %cast_48 = memref.cast %134 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
    %cast_49 = memref.cast %132 : memref<4x4x16x16xf32, #hivm.address_space<cc>> to memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
    call @mma_tile_half_to_float(%cast_47, %cast_48, %12, %25, %25, %25, %cast_49, %6, %1, %6, %138, %6, %6, %6, %22) : (memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, i1, index, index, index, memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, i64, i64, i64, i64, i64, i64, i64, i8) -> ()
    %178 = hivm.hir.pointer_cast(%19) : memref<64x64xf32, #hivm.address_space<ub>>
    %cast_50 = memref.cast %132 : memref<4x4x16x16xf32, #hivm.address_space<cc>> to memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
    %cast_51 = memref.cast %178 : memref<64x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    call @fixpipe_nz2nd_float_to_float_4d_to_2d_ubuf(%cast_50, %cast_51, %1, %20, %1, %21, %22) : (memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, i64, f32, i64, i1, i8) -> ()
    %179 = llvm.add %123, %15 : i32
    %180 = llvm.add %124, %15 : i32
    %181 = llvm.add %126, %10 : i64
    memref.store %181, %alloca_0[%24] : memref<1xi64>
    %182 = arith.addi %122, %15 overflow<nsw> : i32
    cf.br ^bb3(%182, %179, %180 : i32, i32, i32)
  ^bb5:  // pred: ^bb3
    %183 = llvm.add %73, %10 : i64
    memref.store %183, %alloca[%24] : memref<1xi64>
    %184 = arith.addi %71, %arg41 overflow<nsw> : i32
    cf.br ^bb1(%184 : i32)
  ^bb6:  // pred: ^bb1
    return
  }
  func.func @_fwd_kernel_mix_aiv(%arg0: i64 {hacc.arg_type = #hacc.arg_type<ffts_base_address>}, %arg1: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<sync_block_lock>}, %arg2: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<workspace>}, %arg3: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg4: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg5: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg6: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg7: memref<?xf32, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg8: i32, %arg9: i32, %arg10: i32, %arg11: i32, %arg12: i32, %arg13: i32, %arg14: i32, %arg15: i32, %arg16: i32, %arg17: i32, %arg18: i32, %arg19: i32, %arg20: i32, %arg21: i32, %arg22: i32, %arg23: i32, %arg24: f32, %arg25: f32, %arg26: f32, %arg27: f32, %arg28: f32, %arg29: f32, %arg30: f32, %arg31: f32, %arg32: i32, %arg33: i32, %arg34: i32, %arg35: i32, %arg36: i32, %arg37: i32, %arg38: i32, %arg39: i32, %arg40: i32, %arg41: i32, %arg42: i32, %arg43: i32) attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, func_dyn_memref_args = dense<[false, true, true, true, true, true, true, true, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false]> : vector<44xi1>, hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.part_of_mix, hivm.vf_mode = #hivm.vf_mode<SIMD>, hivm_regbaseintrins.target = #hivm_regbaseintrins.target<"dav-c310">, parallel_mode = "simd"} {
    %0 = llvm.mlir.constant(149792 : i64) : i64
    %1 = llvm.mlir.constant(149536 : i64) : i64
    %2 = llvm.mlir.constant(149504 : i64) : i64
    %3 = llvm.mlir.constant(149248 : i64) : i64
    %4 = llvm.mlir.constant(116224 : i64) : i64
    %5 = llvm.mlir.constant(24576 : i64) : i64
    %6 = llvm.mlir.constant(108032 : i64) : i64
    %7 = llvm.mlir.constant(91648 : i64) : i64
    %8 = llvm.mlir.constant(91136 : i64) : i64
    %9 = llvm.mlir.constant(82944 : i64) : i64
    %10 = llvm.mlir.constant(82688 : i64) : i64
    %11 = llvm.mlir.constant(66304 : i64) : i64
    %12 = llvm.mlir.constant(66048 : i64) : i64
    %13 = llvm.mlir.constant(49664 : i64) : i64
    %14 = llvm.mlir.constant(33280 : i64) : i64
    %15 = llvm.mlir.constant(25088 : i64) : i64
    %16 = llvm.mlir.constant(132608 : i64) : i64
    %17 = llvm.mlir.constant(91392 : i64) : i64
    %18 = llvm.mlir.constant(148992 : i64) : i64
    %19 = llvm.mlir.constant(16896 : i64) : i64
    %20 = llvm.mlir.constant(16640 : i64) : i64
    %21 = llvm.mlir.constant(16384 : i64) : i64
    %22 = llvm.mlir.constant(0 : i64) : i64
    %23 = llvm.mlir.constant(63 : i32) : i32
    %24 = llvm.mlir.constant(64 : i32) : i32
    %25 = llvm.mlir.constant(0 : i32) : i32
    %26 = llvm.mlir.constant(0 : index) : i64
    %27 = llvm.mlir.constant(64 : index) : i64
    %28 = hivm.hir.get_block_idx -> i64
    %30 = llvm.srem %29, %arg41  : i32
    %31 = hivm.hir.pointer_cast(%22) : memref<64x64xf32, #hivm.address_space<ub>>
    %32 = llvm.add %arg35, %23 : i32
    %33 = llvm.sdiv %32, %24  : i32
    %34 = llvm.mul %33, %arg33 : i32
    %35 = llvm.mul %34, %arg32 : i32
    %36 = llvm.sub %arg36, %arg35 : i32
    %40 = hivm.hir.pointer_cast(%21) : memref<64xf32, #hivm.address_space<ub>>
    %41 = hivm.hir.pointer_cast(%20) : memref<64xi32, #hivm.address_space<ub>>
    call @_fwd_kernel_outlined_merged_vf_0(%31, %40, %41) {hivm.vector_function, no_inline, ptc_simdvf} : (memref<64x64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xi32, #hivm.address_space<ub>>) -> ()
    %42 = llvm.sitofp %arg35 : i32 to f32
    %49 = hivm.hir.get_sub_block_idx -> i64
    %50 = llvm.icmp "eq" %49, %26 : i64
    cf.br ^bb1(%30 : i32)
  ^bb1(%51: i32):  // 2 preds: ^bb0, ^bb21
    %52 = arith.cmpi slt, %51, %35 : i32
    cf.cond_br %52, ^bb2, ^bb22
  ^bb2:  // pred: ^bb1
    %53 = llvm.sdiv %51, %33  : i32
    %54 = llvm.sdiv %53, %arg33  : i32
    %55 = llvm.srem %53, %arg33  : i32
    %56 = llvm.srem %51, %33  : i32
    %57 = llvm.mul %56, %24 : i32
    %58 = llvm.add %57, %24 : i32
    %59 = llvm.add %58, %36 : i32
    %60 = llvm.intr.smin(%arg36, %59)  : (i32, i32) -> i32
    %63 = llvm.mul %61, %37 : i64
    %64 = llvm.mul %62, %38 : i64
    %65 = llvm.add %63, %64 : i64
    %67 = llvm.mul %54, %arg33 : i32
    %68 = llvm.add %67, %55 : i32
    %70 = llvm.mul %69, %39 : i64
    %74 = hivm.hir.pointer_cast(%19) : memref<64x64xf16, #hivm.address_space<ub>>
    %c-1 = arith.constant -1 : index
    %76 = arith.addi %44, %75 : index
    %77 = builtin.unrealized_conversion_cast %76 : index to i64
    %78 = llvm.intr.smax(%77, %26)  : (i64, i64) -> i64
    %79 = llvm.intr.smin(%78, %27)  : (i64, i64) -> i64
    %81 = llvm.icmp "slt" %79, %27 : i64
    cf.cond_br %81, ^bb3, ^bb4
  ^bb3:  // pred: ^bb2
    call @_fwd_kernel_outlined_vf_0(%74) {hivm.vector_function, no_inline} : (memref<64x64xf16, #hivm.address_space<ub>>) -> ()
    cf.br ^bb4
  ^bb4:  // 2 preds: ^bb2, ^bb3
    %82 = llvm.add %57, %36 : i32
    %83 = hivm.hir.pointer_cast(%18) : memref<64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_outlined_vf_4(%83) {hivm.vector_function, no_inline} : (memref<64xf32, #hivm.address_space<ub>>) -> ()
    %84 = hivm.hir.pointer_cast(%17) : memref<64xf32, #hivm.address_space<ub>>
    %cast = memref.cast %40 : memref<64xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_0 = memref.cast %84 : memref<64xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @copy_ubuf_to_ubuf_1d_float(%cast, %cast_0) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %85 = hivm.hir.pointer_cast(%16) : memref<64x64xf32, #hivm.address_space<ub>>
    %base_buffer, %offset, %sizes:2, %strides:2 = memref.extract_strided_metadata %31 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [0], sizes: [4096], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<4096xf32, #hivm.address_space<ub>>
    %base_buffer_1, %offset_2, %sizes_3:2, %strides_4:2 = memref.extract_strided_metadata %85 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast_5 = memref.reinterpret_cast %base_buffer_1 to offset: [0], sizes: [4096], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<4096xf32, #hivm.address_space<ub>>
    %cast_6 = memref.cast %reinterpret_cast : memref<4096xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_7 = memref.cast %reinterpret_cast_5 : memref<4096xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @copy_ubuf_to_ubuf_1d_float(%cast_6, %cast_7) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    cf.br ^bb5(%25, %83, %84, %85, %25, %25 : i32, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>, i32, i32)
  ^bb5(%86: i32, %87: memref<64xf32, #hivm.address_space<ub>>, %88: memref<64xf32, #hivm.address_space<ub>>, %89: memref<64x64xf32, #hivm.address_space<ub>>, %90: i32, %91: i32):  // 2 preds: ^bb4, ^bb16
    %92 = arith.cmpi slt, %86, %60 : i32
    cf.cond_br %92, ^bb6, ^bb17
  ^bb6:  // pred: ^bb5
    %97 = hivm.hir.pointer_cast(%15) : memref<64x64xf16, #hivm.address_space<ub>>
    %c-1_8 = arith.constant -1 : index
    %99 = arith.addi %46, %98 : index
    %100 = builtin.unrealized_conversion_cast %99 : index to i64
    %101 = llvm.intr.smax(%100, %26)  : (i64, i64) -> i64
    %102 = llvm.intr.smin(%101, %27)  : (i64, i64) -> i64
    %103 = llvm.icmp "slt" %102, %27 : i64
    cf.cond_br %103, ^bb7, ^bb8
  ^bb7:  // pred: ^bb6
    call @_fwd_kernel_outlined_vf_1(%97) {hivm.vector_function, no_inline} : (memref<64x64xf16, #hivm.address_space<ub>>) -> ()
    cf.br ^bb8
  ^bb8:  // 2 preds: ^bb6, ^bb7
    %104 = hivm.hir.pointer_cast(%14) : memref<64x64xf32, #hivm.address_space<ub>>
    %105 = hivm.hir.pointer_cast(%14) : memref<64x64xf32, #hivm.address_space<ub>>
    %base_buffer_9, %offset_10, %sizes_11:2, %strides_12:2 = memref.extract_strided_metadata %104 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast_13 = memref.reinterpret_cast %base_buffer_9 to offset: [0], sizes: [4096], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<4096xf32, #hivm.address_space<ub>>
    %base_buffer_14, %offset_15, %sizes_16:2, %strides_17:2 = memref.extract_strided_metadata %105 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast_18 = memref.reinterpret_cast %base_buffer_14 to offset: [0], sizes: [4096], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<4096xf32, #hivm.address_space<ub>>
    %106 = hivm.hir.pointer_cast(%22) : memref<0xf32, #hivm.address_space<ub>>
    %cast_19 = memref.cast %reinterpret_cast_13 : memref<4096xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_20 = memref.cast %reinterpret_cast : memref<4096xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_21 = memref.cast %reinterpret_cast_18 : memref<4096xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_22 = memref.cast %106 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @vadd_1d_float(%cast_19, %cast_20, %cast_21, %cast_22) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %107 = hivm.hir.pointer_cast(%13) : memref<64x64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_outlined_vf_3(%105, %arg24, %107) {hivm.vector_function, no_inline} : (memref<64x64xf32, #hivm.address_space<ub>>, f32, memref<64x64xf32, #hivm.address_space<ub>>) -> ()
    %108 = llvm.add %86, %24 : i32
    %109 = llvm.icmp "sgt" %108, %82 : i32
    cf.cond_br %109, ^bb9, ^bb10
  ^bb9:  // pred: ^bb8
    %110 = llvm.sub %86, %57 : i32
    %111 = llvm.sub %110, %36 : i32
    %112 = llvm.sitofp %111 : i32 to f32
    %113 = hivm.hir.pointer_cast(%13) : memref<64x64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_0_outlined_vf_0(%41, %107, %112, %113) {hivm.vector_function, no_inline} : (memref<64xi32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>, f32, memref<64x64xf32, #hivm.address_space<ub>>) -> ()
    cf.br ^bb11(%113 : memref<64x64xf32, #hivm.address_space<ub>>)
  ^bb10:  // pred: ^bb8
    cf.br ^bb11(%107 : memref<64x64xf32, #hivm.address_space<ub>>)
  ^bb11(%114: memref<64x64xf32, #hivm.address_space<ub>>):  // 2 preds: ^bb9, ^bb10
    cf.br ^bb12
  ^bb12:  // pred: ^bb11
    %115 = hivm.hir.pointer_cast(%12) : memref<64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_2_outlined_vf_0(%114, %115) {hivm.vector_function, no_inline} : (memref<64x64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>) -> ()
    %116 = hivm.hir.pointer_cast(%12) : memref<64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_3_outlined_vf_0(%87, %115, %116) {hivm.vector_function, no_inline} : (memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>) -> ()
    %117 = hivm.hir.pointer_cast(%11) : memref<64x64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_3_outlined_vf_1(%116, %114, %117) {hivm.vector_function, no_inline} : (memref<64xf32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>) -> ()
    %118 = hivm.hir.pointer_cast(%10) : memref<64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_3_outlined_vf_2(%117, %118) {hivm.vector_function, no_inline} : (memref<64x64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>) -> ()
    %119 = hivm.hir.pointer_cast(%9) : memref<64x64xf16, #hivm.address_space<ub>>
    %c-1_23 = arith.constant -1 : index
    %121 = arith.addi %46, %120 : index
    %122 = builtin.unrealized_conversion_cast %121 : index to i64
    %123 = llvm.intr.smax(%122, %26)  : (i64, i64) -> i64
    %124 = llvm.intr.smin(%123, %27)  : (i64, i64) -> i64
    %125 = llvm.icmp "slt" %124, %27 : i64
    cf.cond_br %125, ^bb13, ^bb14
  ^bb13:  // pred: ^bb12
    call @_fwd_kernel_outlined_vf_2(%119) {hivm.vector_function, no_inline} : (memref<64x64xf16, #hivm.address_space<ub>>) -> ()
    cf.br ^bb14
  ^bb14:  // 2 preds: ^bb12, ^bb13
    %126 = hivm.hir.pointer_cast(%8) : memref<64xf32, #hivm.address_space<ub>>
    %127 = hivm.hir.pointer_cast(%17) : memref<64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_4_outlined_vf_0(%87, %116, %126, %88, %118, %127) {hivm.vector_function, no_inline} : (memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>) -> ()
    %128 = hivm.hir.pointer_cast(%7) : memref<64x64xf32, #hivm.address_space<ub>>
    %129 = hivm.hir.pointer_cast(%11) : memref<64x64xf16, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_4_outlined_merged_vf_0(%126, %89, %128, %117, %129) {hivm.vector_function, no_inline, ptc_simdvf} : (memref<64xf32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>, memref<64x64xf16, #hivm.address_space<ub>>) -> ()
    %base_buffer_24, %offset_25, %sizes_26:2, %strides_27:2 = memref.extract_strided_metadata %129 : memref<64x64xf16, #hivm.address_space<ub>> -> memref<f16, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast_28 = memref.reinterpret_cast %base_buffer_24 to offset: [0], sizes: [64, 4, 16], strides: [64, 16, 1] : memref<f16, #hivm.address_space<ub>> to memref<64x4x16xf16, #hivm.address_space<ub>>
    %130 = hivm.hir.pointer_cast(%6) : memref<4x64x16xf16, #hivm.address_space<ub>>
    %cast_29 = memref.cast %reinterpret_cast_28 : memref<64x4x16xf16, #hivm.address_space<ub>> to memref<?x?x?xf16, strided<[?, ?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_30 = memref.cast %130 : memref<4x64x16xf16, #hivm.address_space<ub>> to memref<?x?x?xf16, strided<[?, ?, ?], offset: ?>, #hivm.address_space<ub>>
    call @transpose_3d_without_last_axis_half(%cast_29, %cast_30) : (memref<?x?x?xf16, strided<[?, ?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?x?xf16, strided<[?, ?, ?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %131 = hivm.hir.pointer_cast(%5) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    cf.cond_br %50, ^bb15, ^bb16
  ^bb15:  // pred: ^bb14
    %base_buffer_31, %offset_32, %sizes_33:3, %strides_34:3 = memref.extract_strided_metadata %130 : memref<4x64x16xf16, #hivm.address_space<ub>> -> memref<f16, #hivm.address_space<ub>>, index, index, index, index, index, index, index
    %reinterpret_cast_35 = memref.reinterpret_cast %base_buffer_31 to offset: [0], sizes: [4096], strides: [1] : memref<f16, #hivm.address_space<ub>> to memref<4096xf16, #hivm.address_space<ub>>
    %base_buffer_36, %offset_37, %sizes_38:4, %strides_39:4 = memref.extract_strided_metadata %131 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> -> memref<f16, #hivm.address_space<cbuf>>, index, index, index, index, index, index, index, index, index
    %reinterpret_cast_40 = memref.reinterpret_cast %base_buffer_36 to offset: [0], sizes: [4096], strides: [1] : memref<f16, #hivm.address_space<cbuf>> to memref<4096xf16, #hivm.address_space<cbuf>>
    %cast_41 = memref.cast %reinterpret_cast_35 : memref<4096xf16, #hivm.address_space<ub>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_42 = memref.cast %reinterpret_cast_40 : memref<4096xf16, #hivm.address_space<cbuf>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<cbuf>>
    call @copy_ubuf_to_cbuf_1d_half(%cast_41, %cast_42) : (memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
    cf.br ^bb16
  ^bb16:  // 2 preds: ^bb14, ^bb15
    %132 = hivm.hir.pointer_cast(%4) : memref<64x64xf32, #hivm.address_space<ub>>
    %133 = hivm.hir.pointer_cast(%16) : memref<64x64xf32, #hivm.address_space<ub>>
    %base_buffer_43, %offset_44, %sizes_45:2, %strides_46:2 = memref.extract_strided_metadata %132 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast_47 = memref.reinterpret_cast %base_buffer_43 to offset: [0], sizes: [4096], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<4096xf32, #hivm.address_space<ub>>
    %base_buffer_48, %offset_49, %sizes_50:2, %strides_51:2 = memref.extract_strided_metadata %128 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast_52 = memref.reinterpret_cast %base_buffer_48 to offset: [0], sizes: [4096], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<4096xf32, #hivm.address_space<ub>>
    %base_buffer_53, %offset_54, %sizes_55:2, %strides_56:2 = memref.extract_strided_metadata %133 : memref<64x64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast_57 = memref.reinterpret_cast %base_buffer_53 to offset: [0], sizes: [4096], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<4096xf32, #hivm.address_space<ub>>
    %134 = hivm.hir.pointer_cast(%22) : memref<0xf32, #hivm.address_space<ub>>
    %cast_58 = memref.cast %reinterpret_cast_47 : memref<4096xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_59 = memref.cast %reinterpret_cast_52 : memref<4096xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_60 = memref.cast %reinterpret_cast_57 : memref<4096xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_61 = memref.cast %134 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @vadd_1d_float(%cast_58, %cast_59, %cast_60, %cast_61) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %135 = llvm.add %90, %24 : i32
    %136 = llvm.add %91, %24 : i32
    %137 = hivm.hir.pointer_cast(%18) : memref<64xf32, #hivm.address_space<ub>>
    %cast_62 = memref.cast %116 : memref<64xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_63 = memref.cast %137 : memref<64xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @copy_ubuf_to_ubuf_1d_float(%cast_62, %cast_63) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %138 = arith.addi %86, %24 overflow<nsw> : i32
    cf.br ^bb5(%138, %137, %127, %133, %135, %136 : i32, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>, i32, i32)
  ^bb17:  // pred: ^bb5
    %139 = hivm.hir.pointer_cast(%3) : memref<64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_6_outlined_vf_0(%41, %88, %57, %42, %139) {hivm.vector_function, no_inline} : (memref<64xi32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, i32, f32, memref<64xf32, #hivm.address_space<ub>>) -> ()
    %140 = hivm.hir.pointer_cast(%2) : memref<64xi1, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_7_outlined_vf_0(%139, %140) {hivm.vector_function, no_inline} : (memref<64xf32, #hivm.address_space<ub>>, memref<64xi1, #hivm.address_space<ub>>) -> ()
    %141 = hivm.hir.pointer_cast(%3) : memref<64xf32, #hivm.address_space<ub>>
    %142 = hivm.hir.pointer_cast(%1) : memref<64xf32, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_7_outlined_vf_1(%140, %139, %141, %87, %142) {hivm.vector_function, no_inline} : (memref<64xi1, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>) -> ()
    %144 = arith.addi %66, %143 : index
    %145 = hivm.hir.pointer_cast(%0) : memref<64x64xf16, #hivm.address_space<ub>>
    call @_fwd_kernel_fused_8_outlined_vf_0(%140, %141, %89, %145) {hivm.vector_function, no_inline} : (memref<64xi1, #hivm.address_space<ub>>, memref<64xf32, #hivm.address_space<ub>>, memref<64x64xf32, #hivm.address_space<ub>>, memref<64x64xf16, #hivm.address_space<ub>>) -> ()
    %base_buffer_64, %offset_65, %sizes_66:2, %strides_67:2 = memref.extract_strided_metadata %145 : memref<64x64xf16, #hivm.address_space<ub>> -> memref<f16, #hivm.address_space<ub>>, index, index, index, index, index
    %reinterpret_cast_68 = memref.reinterpret_cast %base_buffer_64 to offset: [0], sizes: [%80, 64], strides: [64, 1] : memref<f16, #hivm.address_space<ub>> to memref<?x64xf16, strided<[64, 1]>, #hivm.address_space<ub>>
    %base_buffer_69, %offset_70, %sizes_71, %strides_72 = memref.extract_strided_metadata %arg6 : memref<?xf16, #hivm.address_space<gm>> -> memref<f16, #hivm.address_space<gm>>, index, index, index
    %reinterpret_cast_73 = memref.reinterpret_cast %base_buffer_69 to offset: [%144], sizes: [%80, 64], strides: [%48, 1] : memref<f16, #hivm.address_space<gm>> to memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
    cf.cond_br %50, ^bb18, ^bb19
  ^bb18:  // pred: ^bb17
    %cast_74 = memref.cast %reinterpret_cast_68 : memref<?x64xf16, strided<[64, 1]>, #hivm.address_space<ub>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
    %cast_75 = memref.cast %reinterpret_cast_73 : memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
    call @store_ubuf_to_gm_2d_half(%cast_74, %cast_75, %25) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, i32) -> ()
    cf.br ^bb19
  ^bb19:  // 2 preds: ^bb17, ^bb18
    %146 = arith.addi %73, %71 : index
    %base_buffer_76, %offset_77, %sizes_78, %strides_79 = memref.extract_strided_metadata %142 : memref<64xf32, #hivm.address_space<ub>> -> memref<f32, #hivm.address_space<ub>>, index, index, index
    %reinterpret_cast_80 = memref.reinterpret_cast %base_buffer_76 to offset: [0], sizes: [%80], strides: [1] : memref<f32, #hivm.address_space<ub>> to memref<?xf32, strided<[1]>, #hivm.address_space<ub>>
    %base_buffer_81, %offset_82, %sizes_83, %strides_84 = memref.extract_strided_metadata %arg7 : memref<?xf32, #hivm.address_space<gm>> -> memref<f32, #hivm.address_space<gm>>, index, index, index
    %reinterpret_cast_85 = memref.reinterpret_cast %base_buffer_81 to offset: [%146], sizes: [%80], strides: [1] : memref<f32, #hivm.address_space<gm>> to memref<?xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
    cf.cond_br %50, ^bb20, ^bb21
  ^bb20:  // pred: ^bb19
    %cast_86 = memref.cast %reinterpret_cast_80 : memref<?xf32, strided<[1]>, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    %cast_87 = memref.cast %reinterpret_cast_85 : memref<?xf32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>
    call @store_ubuf_to_gm_1d_float(%cast_86, %cast_87, %25) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>, i32) -> ()
    cf.br ^bb21
  ^bb21:  // 2 preds: ^bb19, ^bb20
    %147 = arith.addi %51, %arg41 overflow<nsw> : i32
    cf.br ^bb1(%147 : i32)
  ^bb22:  // pred: ^bb1
    return
  }
}
