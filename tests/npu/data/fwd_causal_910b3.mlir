module attributes {hivm.module_core_type = #hivm.module_core_type<MIX>} {
  func.func @_fwd_kernel_infer_workspace_shape_function() -> index attributes {hacc.function_kind = #hacc.function_kind<HOST>, hacc.host_func_type = #hacc.host_func_type<infer_workspace_shape_function>} {
    %c114688 = arith.constant 114688 : index
    return %c114688 : index
  }
  func.func @_fwd_kernel_infer_task_type_function() -> i8 attributes {hacc.function_kind = #hacc.function_kind<HOST>, hacc.host_func_type = #hacc.host_func_type<infer_task_type_function>} {
    %c32_i8 = arith.constant 32 : i8
    return %c32_i8 : i8
  }
  func.func @_fwd_kernel_mix_aic(%arg0: i64 {hacc.arg_type = #hacc.arg_type<ffts_base_address>}, %arg1: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<sync_block_lock>}, %arg2: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<workspace>}, %arg3: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg4: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg5: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg6: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg7: memref<?xf32, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg8: i32, %arg9: i32, %arg10: i32, %arg11: i32, %arg12: i32, %arg13: i32, %arg14: i32, %arg15: i32, %arg16: i32, %arg17: i32, %arg18: i32, %arg19: i32, %arg20: i32, %arg21: i32, %arg22: i32, %arg23: i32, %arg24: f32, %arg25: f32, %arg26: f32, %arg27: f32, %arg28: f32, %arg29: f32, %arg30: f32, %arg31: f32, %arg32: i32, %arg33: i32, %arg34: i32, %arg35: i32, %arg36: i32, %arg37: i32, %arg38: i32, %arg39: i32, %arg40: i32, %arg41: i32, %arg42: i32, %arg43: i32) attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, func_dyn_memref_args = dense<[false, true, true, true, true, true, true, true, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false]> : vector<44xi1>, hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<AIC>, hivm.part_of_mix, hivm.storage_aligned, parallel_mode = "simd"} {
    %false = arith.constant false
    %c0_i8 = arith.constant 0 : i8
    %c128_i32 = arith.constant 128 : i32
    %true = arith.constant true
    %c1 = arith.constant 1 : index
    %c32 = arith.constant 32 : index
    %cst = arith.constant 0.000000e+00 : f16
    %c64 = arith.constant 64 : index
    %c0 = arith.constant 0 : index
    %c0_i32 = arith.constant 0 : i32
    %c64_i32 = arith.constant 64 : i32
    %c32_i32 = arith.constant 32 : i32
    %c63_i32 = arith.constant 63 : i32
    %c1_i64 = arith.constant 1 : i64
    %c3_i64 = arith.constant 3 : i64
    %c4_i64 = arith.constant 4 : i64
    %c-1_i64 = arith.constant -1 : i64
    %c32768_i64 = arith.constant 32768 : i64
    %c12288_i64 = arith.constant 12288 : i64
    %c36864_i64 = arith.constant 36864 : i64
    %c16384_i64 = arith.constant 16384 : i64
    %c28672_i64 = arith.constant 28672 : i64
    %c8192_i64 = arith.constant 8192 : i64
    %c0_i64 = arith.constant 0 : i64
    %c20480_i64 = arith.constant 20480 : i64
    %0 = hivm.hir.pointer_cast(%c0_i64) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %1 = hivm.hir.pointer_cast(%c20480_i64) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
    %2 = hivm.hir.pointer_cast(%c8192_i64) : memref<4x2x16x16xf16, #hivm.address_space<cbuf>>
    %3 = hivm.hir.pointer_cast(%c28672_i64) : memref<4x2x16x16xf16, #hivm.address_space<cbuf>>
    %4 = hivm.hir.pointer_cast(%c16384_i64) : memref<2x4x16x16xf16, #hivm.address_space<cbuf>>
    %5 = hivm.hir.pointer_cast(%c36864_i64) : memref<2x4x16x16xf16, #hivm.address_space<cbuf>>
    %6 = hivm.hir.pointer_cast(%c12288_i64) : memref<4x2x16x16xf16, #hivm.address_space<cbuf>>
    %7 = hivm.hir.pointer_cast(%c32768_i64) : memref<4x2x16x16xf16, #hivm.address_space<cbuf>>
    %8 = hivm.hir.get_block_idx -> i64
    %14 = arith.addi %arg35, %c63_i32 : i32
    %18 = arith.subi %arg36, %arg35 : i32
    scf.for %arg44 = %12 to %17 step %arg41  : i32 {
      %35 = arith.cmpi eq, %34, %c1_i64 : i64
      %36 = arith.select %35, %1, %0 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
      %42 = arith.xori %41, %true : i1
      %43 = arith.extui %42 : i1 to i64
      %50 = arith.addi %48, %c64_i32 : i32
      %51 = arith.addi %50, %18 : i32
      %52 = arith.minsi %arg36, %51 : i32
      %57 = arith.addi %54, %56 : i64
      %62 = arith.addi %60, %61 : i64
      %66 = arith.addi %64, %65 : i64
      %reinterpret_cast = memref.reinterpret_cast %arg3 to offset: [%69], sizes: [64, 64], strides: [%25, 1] : memref<?xf16, #hivm.address_space<gm>> to memref<64x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
      %72 = arith.cmpi slt, %71, %c64 : index
      %subview = memref.subview %reinterpret_cast[0, 0] [%71, 64] [1, 1] : memref<64x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
      %subview_0 = memref.subview %36[0, 0, 0, 0] [4, %73, 16, 16] [1, 1, 1, 1] : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> to memref<4x?x16x16xf16, strided<[1024, 256, 16, 1]>, #hivm.address_space<cbuf>>
      scf.if %72 {
        %collapse_shape = memref.collapse_shape %36 [[0, 1, 2, 3]] : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> into memref<4096xf16, #hivm.address_space<cbuf>>
        %cast_4 = memref.cast %collapse_shape : memref<4096xf16, #hivm.address_space<cbuf>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<cbuf>>
        func.call @set_l1_2d_half(%cst, %cast_4) : (f16, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
      } {hivm.unlikely_condition}
      %cast = memref.cast %subview : memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
      %cast_1 = memref.cast %subview_0 : memref<4x?x16x16xf16, strided<[1024, 256, 16, 1]>, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
      func.call @nd2nz_half(%cast, %cast_1) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
      %74 = hivm.hir.get_block_idx -> i64
      %view = memref.view %arg2[%76][] : memref<?xi8, #hivm.address_space<gm>> to memref<4x64x64xf32, #hivm.address_space<gm>>
      %77 = hivm.hir.get_block_idx -> i64
      %view_2 = memref.view %arg2[%79][] : memref<?xi8, #hivm.address_space<gm>> to memref<4x64x32xf32, #hivm.address_space<gm>>
      %80 = hivm.hir.get_block_idx -> i64
      %view_3 = memref.view %arg2[%82][] : memref<?xi8, #hivm.address_space<gm>> to memref<4x64x32xf16, #hivm.address_space<gm>>
      %84:2 = scf.for %arg45 = %c0_i32 to %52 step %c128_i32 iter_args(%arg46 = %c0_i32, %arg47 = %c0_i32) -> (i32, i32)  : i32 {
        %87 = scf.for %arg48 = %c0 to %86 step %c1 iter_args(%arg49 = %arg46) -> (i32) {
          %96 = arith.cmpi eq, %95, %c1_i64 : i64
          %97 = arith.select %96, %3, %2 : memref<4x2x16x16xf16, #hivm.address_space<cbuf>>
          %112 = arith.select %111, %c3_i64, %c4_i64 : i64
          %reinterpret_cast_4 = memref.reinterpret_cast %arg4 to offset: [%116], sizes: [32, 64], strides: [%28, 1] : memref<?xf16, #hivm.address_space<gm>> to memref<32x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
          %119 = arith.cmpi slt, %118, %c32 : index
          %subview_5 = memref.subview %reinterpret_cast_4[0, 0] [%118, 64] [1, 1] : memref<32x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
          %subview_6 = memref.subview %97[0, 0, 0, 0] [4, %120, 16, 16] [1, 1, 1, 1] : memref<4x2x16x16xf16, #hivm.address_space<cbuf>> to memref<4x?x16x16xf16, strided<[512, 256, 16, 1]>, #hivm.address_space<cbuf>>
          scf.if %119 {
            %collapse_shape_15 = memref.collapse_shape %97 [[0, 1, 2, 3]] : memref<4x2x16x16xf16, #hivm.address_space<cbuf>> into memref<2048xf16, #hivm.address_space<cbuf>>
            %cast_16 = memref.cast %collapse_shape_15 : memref<2048xf16, #hivm.address_space<cbuf>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<cbuf>>
            func.call @set_l1_2d_half(%cst, %cast_16) : (f16, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
          } {hivm.unlikely_condition}
          %cast_7 = memref.cast %subview_5 : memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
          %cast_8 = memref.cast %subview_6 : memref<4x?x16x16xf16, strided<[512, 256, 16, 1]>, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
          func.call @nd2nz_half(%cast_7, %cast_8) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
          %121 = hivm.hir.pointer_cast(%c0_i64) : memref<2x4x16x16xf32, #hivm.address_space<cc>>
          %cast_9 = memref.cast %36 : memref<4x4x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
          %cast_10 = memref.cast %97 : memref<4x2x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
          %cast_11 = memref.cast %121 : memref<2x4x16x16xf32, #hivm.address_space<cc>> to memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
          func.call @mma_tile_half_to_float_tb(%cast_9, %cast_10, %true, %71, %c64, %118, %cast_11, %c-1_i64, %c0_i64, %c-1_i64, %112, %104, %c-1_i64, %c-1_i64, %c0_i8) : (memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, i1, index, index, index, memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, i64, i64, i64, i64, i64, i64, i64, i8) -> ()
          %subview_12 = memref.subview %view_2[%arg48, 0, 0] [1, 64, 32] [1, 1, 1] : memref<4x64x32xf32, #hivm.address_space<gm>> to memref<1x64x32xf32, strided<[2048, 32, 1], offset: ?>, #hivm.address_space<gm>>
          %collapse_shape = memref.collapse_shape %subview_12 [[0, 1], [2]] : memref<1x64x32xf32, strided<[2048, 32, 1], offset: ?>, #hivm.address_space<gm>> into memref<64x32xf32, strided<[32, 1], offset: ?>, #hivm.address_space<gm>>
          %cast_13 = memref.cast %121 : memref<2x4x16x16xf32, #hivm.address_space<cc>> to memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
          %cast_14 = memref.cast %collapse_shape : memref<64x32xf32, strided<[32, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
          func.call @fixpipe_nz2nd_float_to_float_4d_to_2d(%cast_13, %cast_14, %c0_i64, %c0_i64, %false, %c0_i8) : (memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, i64, i64, i1, i8) -> ()
          %122 = arith.addi %arg49, %c32_i32 : i32
          scf.yield %122 : i32
        } {hivm.loop_core_type = #hivm.tcore_type<CUBE>, multibuffer_unroll_factor = 4 : i32}
        %88 = scf.for %arg48 = %c0 to %86 step %c1 iter_args(%arg49 = %arg47) -> (i32) {
          %96 = arith.cmpi eq, %95, %c1_i64 : i64
          %97 = arith.select %96, %5, %4 : memref<2x4x16x16xf16, #hivm.address_space<cbuf>>
          %105 = arith.cmpi eq, %104, %c1_i64 : i64
          %106 = arith.select %105, %7, %6 : memref<4x2x16x16xf16, #hivm.address_space<cbuf>>
          %121 = arith.select %120, %c3_i64, %c4_i64 : i64
          %reinterpret_cast_4 = memref.reinterpret_cast %arg5 to offset: [%126], sizes: [32, 64], strides: [%29, 1] : memref<?xf16, #hivm.address_space<gm>> to memref<32x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
          %129 = arith.cmpi slt, %128, %c32 : index
          %subview_5 = memref.subview %reinterpret_cast_4[0, 0] [%128, 64] [1, 1] : memref<32x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
          %subview_6 = memref.subview %106[0, 0, 0, 0] [4, %130, 16, 16] [1, 1, 1, 1] : memref<4x2x16x16xf16, #hivm.address_space<cbuf>> to memref<4x?x16x16xf16, strided<[512, 256, 16, 1]>, #hivm.address_space<cbuf>>
          scf.if %129 {
            %collapse_shape_18 = memref.collapse_shape %106 [[0, 1, 2, 3]] : memref<4x2x16x16xf16, #hivm.address_space<cbuf>> into memref<2048xf16, #hivm.address_space<cbuf>>
            %cast_19 = memref.cast %collapse_shape_18 : memref<2048xf16, #hivm.address_space<cbuf>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<cbuf>>
            func.call @set_l1_2d_half(%cst, %cast_19) : (f16, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
          } {hivm.unlikely_condition}
          %cast_7 = memref.cast %subview_5 : memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
          %cast_8 = memref.cast %subview_6 : memref<4x?x16x16xf16, strided<[512, 256, 16, 1]>, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
          func.call @nd2nz_half(%cast_7, %cast_8) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
          %subview_9 = memref.subview %view_3[%arg48, 0, 0] [1, 64, 32] [1, 1, 1] : memref<4x64x32xf16, #hivm.address_space<gm>> to memref<64x32xf16, strided<[32, 1], offset: ?>, #hivm.address_space<gm>>
          %cast_10 = memref.cast %subview_9 : memref<64x32xf16, strided<[32, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
          %cast_11 = memref.cast %97 : memref<2x4x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
          func.call @nd2nz_half(%cast_10, %cast_11) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>) -> ()
          %131 = hivm.hir.pointer_cast(%c8192_i64) : memref<4x4x16x16xf32, #hivm.address_space<cc>>
          %cast_12 = memref.cast %97 : memref<2x4x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
          %cast_13 = memref.cast %106 : memref<4x2x16x16xf16, #hivm.address_space<cbuf>> to memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>
          %cast_14 = memref.cast %131 : memref<4x4x16x16xf32, #hivm.address_space<cc>> to memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
          func.call @mma_tile_half_to_float(%cast_12, %cast_13, %true, %c64, %c32, %c64, %cast_14, %c0_i64, %c-1_i64, %c-1_i64, %121, %113, %c-1_i64, %c-1_i64, %c0_i8) : (memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, memref<?x?x?x?xf16, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cbuf>>, i1, index, index, index, memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, i64, i64, i64, i64, i64, i64, i64, i8) -> ()
          %subview_15 = memref.subview %view[%arg48, 0, 0] [1, 64, 64] [1, 1, 1] : memref<4x64x64xf32, #hivm.address_space<gm>> to memref<1x64x64xf32, strided<[4096, 64, 1], offset: ?>, #hivm.address_space<gm>>
          %collapse_shape = memref.collapse_shape %subview_15 [[0, 1], [2]] : memref<1x64x64xf32, strided<[4096, 64, 1], offset: ?>, #hivm.address_space<gm>> into memref<64x64xf32, strided<[64, 1], offset: ?>, #hivm.address_space<gm>>
          %cast_16 = memref.cast %131 : memref<4x4x16x16xf32, #hivm.address_space<cc>> to memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>
          %cast_17 = memref.cast %collapse_shape : memref<64x64xf32, strided<[64, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
          func.call @fixpipe_nz2nd_float_to_float_4d_to_2d(%cast_16, %cast_17, %c0_i64, %c0_i64, %false, %c0_i8) : (memref<?x?x?x?xf32, strided<[?, ?, ?, ?], offset: ?>, #hivm.address_space<cc>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, i64, i64, i1, i8) -> ()
          %132 = arith.addi %arg49, %c32_i32 : i32
          scf.yield %132 : i32
        } {hivm.loop_core_type = #hivm.tcore_type<CUBE>, multibuffer_unroll_factor = 4 : i32}
        scf.yield %87, %88 : i32, i32
      }
    }
    return
  }
  func.func @_fwd_kernel_mix_aiv(%arg0: i64 {hacc.arg_type = #hacc.arg_type<ffts_base_address>}, %arg1: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<sync_block_lock>}, %arg2: memref<?xi8, #hivm.address_space<gm>> {hacc.arg_type = #hacc.arg_type<workspace>}, %arg3: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg4: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg5: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 0 : i32}, %arg6: memref<?xf16, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg7: memref<?xf32, #hivm.address_space<gm>> {tt.tensor_kind = 1 : i32}, %arg8: i32, %arg9: i32, %arg10: i32, %arg11: i32, %arg12: i32, %arg13: i32, %arg14: i32, %arg15: i32, %arg16: i32, %arg17: i32, %arg18: i32, %arg19: i32, %arg20: i32, %arg21: i32, %arg22: i32, %arg23: i32, %arg24: f32, %arg25: f32, %arg26: f32, %arg27: f32, %arg28: f32, %arg29: f32, %arg30: f32, %arg31: f32, %arg32: i32, %arg33: i32, %arg34: i32, %arg35: i32, %arg36: i32, %arg37: i32, %arg38: i32, %arg39: i32, %arg40: i32, %arg41: i32, %arg42: i32, %arg43: i32) attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, func_dyn_memref_args = dense<[false, true, true, true, true, true, true, true, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false, false]> : vector<44xi1>, hacc.entry, hacc.function_kind = #hacc.function_kind<DEVICE>, hivm.func_core_type = #hivm.func_core_type<AIV>, hivm.part_of_mix, hivm.storage_aligned, parallel_mode = "simd"} {
    %c4_i32 = arith.constant 4 : i32
    %c77632_i64 = arith.constant 77632 : i64
    %c77504_i64 = arith.constant 77504 : i64
    %c77440_i64 = arith.constant 77440 : i64
    %c69248_i64 = arith.constant 69248 : i64
    %c68224_i64 = arith.constant 68224 : i64
    %c64128_i64 = arith.constant 64128 : i64
    %c64032_i64 = arith.constant 64032 : i64
    %c63968_i64 = arith.constant 63968 : i64
    %c62944_i64 = arith.constant 62944 : i64
    %c54752_i64 = arith.constant 54752 : i64
    %c54688_i64 = arith.constant 54688 : i64
    %c54560_i64 = arith.constant 54560 : i64
    %c54528_i64 = arith.constant 54528 : i64
    %c54464_i64 = arith.constant 54464 : i64
    %c54336_i64 = arith.constant 54336 : i64
    %c54208_i64 = arith.constant 54208 : i64
    %c37824_i64 = arith.constant 37824 : i64
    %c36800_i64 = arith.constant 36800 : i64
    %c28608_i64 = arith.constant 28608 : i64
    %c28352_i64 = arith.constant 28352 : i64
    %c28224_i64 = arith.constant 28224 : i64
    %c28096_i64 = arith.constant 28096 : i64
    %c27072_i64 = arith.constant 27072 : i64
    %c26944_i64 = arith.constant 26944 : i64
    %c26880_i64 = arith.constant 26880 : i64
    %c22784_i64 = arith.constant 22784 : i64
    %c18688_i64 = arith.constant 18688 : i64
    %c17664_i64 = arith.constant 17664 : i64
    %c13568_i64 = arith.constant 13568 : i64
    %c13440_i64 = arith.constant 13440 : i64
    %c9344_i64 = arith.constant 9344 : i64
    %c8832_i64 = arith.constant 8832 : i64
    %c46016_i64 = arith.constant 46016 : i64
    %c28480_i64 = arith.constant 28480 : i64
    %c8704_i64 = arith.constant 8704 : i64
    %c8576_i64 = arith.constant 8576 : i64
    %c8448_i64 = arith.constant 8448 : i64
    %c8320_i64 = arith.constant 8320 : i64
    %c8192_i64 = arith.constant 8192 : i64
    %c0_i64 = arith.constant 0 : i64
    %c128_i32 = arith.constant 128 : i32
    %cst = arith.constant 0.000000e+00 : f16
    %c0_i32 = arith.constant 0 : i32
    %c64_i32 = arith.constant 64 : i32
    %cst_0 = arith.constant -3.40282347E+38 : f32
    %c32_i32 = arith.constant 32 : i32
    %cst_1 = arith.constant 1.000000e+00 : f32
    %cst_2 = arith.constant 0x7F800000 : f32
    %c63_i32 = arith.constant 63 : i32
    %cst_3 = arith.constant 0.000000e+00 : f32
    %cst_4 = arith.constant 0xFF800000 : f32
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %0 = hivm.hir.get_block_idx -> i64
    %3 = hivm.hir.pointer_cast(%c0_i64) : memref<32x64xf32, #hivm.address_space<ub>>
    %collapse_shape = memref.collapse_shape %3 [[0, 1]] : memref<32x64xf32, #hivm.address_space<ub>> into memref<2048xf32, #hivm.address_space<ub>>
    %cast = memref.cast %collapse_shape : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @broadcast_scalar_float_to_1d(%cst_3, %cast) : (f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %4 = hivm.hir.pointer_cast(%c8192_i64) : memref<32xf32, #hivm.address_space<ub>>
    %cast_5 = memref.cast %4 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @broadcast_scalar_float_to_1d(%cst_3, %cast_5) : (f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %5 = hivm.hir.pointer_cast(%c8320_i64) : memref<32xf32, #hivm.address_space<ub>>
    %cast_6 = memref.cast %5 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @broadcast_scalar_float_to_1d(%cst_0, %cast_6) : (f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %6 = arith.addi %arg35, %c63_i32 : i32
    %10 = arith.subi %arg36, %arg35 : i32
    %14 = arith.sitofp %arg35 : i32 to f32
    %15 = hivm.hir.pointer_cast(%c8448_i64) : memref<32xf32, #hivm.address_space<ub>>
    %cast_7 = memref.cast %15 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @broadcast_scalar_float_to_1d(%14, %cast_7) : (f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
    %18 = hivm.hir.get_sub_block_idx -> i64
    %23 = hivm.hir.pointer_cast(%c8576_i64) : memref<32xi32, #hivm.address_space<ub>>
    %cast_8 = memref.cast %23 : memref<32xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
    call @arange_1d_int32_t(%cast_8, %20, %c1) : (memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>, index, index) -> ()
    scf.for %arg44 = %22 to %9 step %arg41  : i32 {
      %29 = arith.addi %28, %c64_i32 : i32
      %30 = arith.addi %29, %10 : i32
      %31 = arith.minsi %arg36, %30 : i32
      %36 = arith.addi %34, %35 : i64
      %39 = arith.addi %38, %26 : i32
      %47 = arith.addi %28, %10 : i32
      %48 = hivm.hir.get_block_idx -> i64
      %view = memref.view %arg2[%50][] : memref<?xi8, #hivm.address_space<gm>> to memref<4x64x64xf32, #hivm.address_space<gm>>
      %51 = hivm.hir.get_block_idx -> i64
      %view_9 = memref.view %arg2[%53][] : memref<?xi8, #hivm.address_space<gm>> to memref<4x64x32xf32, #hivm.address_space<gm>>
      %54 = hivm.hir.get_block_idx -> i64
      %view_10 = memref.view %arg2[%56][] : memref<?xi8, #hivm.address_space<gm>> to memref<4x64x32xf16, #hivm.address_space<gm>>
      %58 = hivm.hir.pointer_cast(%c8704_i64) : memref<32xf32, #hivm.address_space<ub>>
      %cast_11 = memref.cast %5 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_12 = memref.cast %58 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @copy_ubuf_to_ubuf_1d_float(%cast_11, %cast_12, %c0_i32, %cst_3) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, f32) -> ()
      %59 = hivm.hir.pointer_cast(%c28480_i64) : memref<32xf32, #hivm.address_space<ub>>
      %cast_13 = memref.cast %4 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_14 = memref.cast %59 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @copy_ubuf_to_ubuf_1d_float(%cast_13, %cast_14, %c0_i32, %cst_3) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, f32) -> ()
      %60 = hivm.hir.pointer_cast(%c46016_i64) : memref<32x64xf32, #hivm.address_space<ub>>
      %collapse_shape_15 = memref.collapse_shape %60 [[0, 1]] : memref<32x64xf32, #hivm.address_space<ub>> into memref<2048xf32, #hivm.address_space<ub>>
      %cast_16 = memref.cast %collapse_shape : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_17 = memref.cast %collapse_shape_15 : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @copy_ubuf_to_ubuf_1d_float(%cast_16, %cast_17, %c0_i32, %cst_3) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, f32) -> ()
      %61:2 = scf.for %arg45 = %c0_i32 to %31 step %c128_i32 iter_args(%arg46 = %59, %arg47 = %60) -> (memref<32xf32, #hivm.address_space<ub>>, memref<32x64xf32, #hivm.address_space<ub>>)  : i32 {
        %subview_86 = memref.subview %view_9[0, %20, 0] [4, 32, 32] [1, 1, 1] {to_be_bubbled_slice} : memref<4x64x32xf32, #hivm.address_space<gm>> to memref<4x32x32xf32, strided<[2048, 32, 1], offset: ?>, #hivm.address_space<gm>>
        %94 = hivm.hir.pointer_cast(%c8832_i64) : memref<4x32xf32, #hivm.address_space<ub>>
        %95 = scf.for %arg48 = %c0 to %93 step %c1 iter_args(%arg49 = %arg46) -> (memref<32xf32, #hivm.address_space<ub>>) {
          %subview_88 = memref.subview %subview_86[%arg48, 0, 0] [1, 32, 32] [1, 1, 1] : memref<4x32x32xf32, strided<[2048, 32, 1], offset: ?>, #hivm.address_space<gm>> to memref<32x32xf32, strided<[32, 1], offset: ?>, #hivm.address_space<gm>>
          %103 = hivm.hir.pointer_cast(%c9344_i64) : memref<32x32xf32, #hivm.address_space<ub>>
          %collapse_shape_89 = memref.collapse_shape %subview_88 [[0, 1]] : memref<32x32xf32, strided<[32, 1], offset: ?>, #hivm.address_space<gm>> into memref<1024xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
          %collapse_shape_90 = memref.collapse_shape %103 [[0, 1]] : memref<32x32xf32, #hivm.address_space<ub>> into memref<1024xf32, #hivm.address_space<ub>>
          %cast_91 = memref.cast %collapse_shape_89 : memref<1024xf32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>
          %cast_92 = memref.cast %collapse_shape_90 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @load_gm_to_ubuf_1d_float(%cast_91, %cast_92, %c0_i32, %cst_3, %c0) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, f32, index) -> ()
          %104 = hivm.hir.pointer_cast(%c9344_i64) : memref<32x32xf32, #hivm.address_space<ub>>
          %collapse_shape_93 = memref.collapse_shape %104 [[0, 1]] : memref<32x32xf32, #hivm.address_space<ub>> into memref<1024xf32, #hivm.address_space<ub>>
          %105 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_94 = memref.cast %collapse_shape_90 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_95 = memref.cast %collapse_shape_93 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_96 = memref.cast %105 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vmuls_vs_1d_float(%cast_94, %arg24, %cast_95, %cast_96) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %106 = arith.addi %102, %c32_i32 : i32
          %107 = arith.cmpi sgt, %106, %47 : i32
          %108 = scf.if %107 -> (memref<32x32xf32, #hivm.address_space<ub>>) {
            %127 = hivm.hir.pointer_cast(%c13440_i64) : memref<32xi32, #hivm.address_space<ub>>
            %cast_146 = memref.cast %127 : memref<32xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            func.call @arange_1d_int32_t(%cast_146, %c0, %c1) : (memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>, index, index) -> ()
            %expand_shape_147 = memref.expand_shape %127 [[0, 1]] output_shape [1, 32] {vector_producer_to_fuse_0} : memref<32xi32, #hivm.address_space<ub>> into memref<1x32xi32, #hivm.address_space<ub>>
            %expand_shape_148 = memref.expand_shape %23 [[0, 1]] output_shape [32, 1] : memref<32xi32, #hivm.address_space<ub>> into memref<32x1xi32, #hivm.address_space<ub>>
            %128 = hivm.hir.pointer_cast(%c13568_i64) : memref<32x32xi32, #hivm.address_space<ub>>
            %129 = hivm.hir.pointer_cast(%c17664_i64) : memref<256xi32, #hivm.address_space<ub>>
            %cast_149 = memref.cast %expand_shape_148 : memref<32x1xi32, #hivm.address_space<ub>> to memref<?x?xi32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
            %cast_150 = memref.cast %expand_shape_147 : memref<1x32xi32, #hivm.address_space<ub>> to memref<?x?xi32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
            %cast_151 = memref.cast %128 : memref<32x32xi32, #hivm.address_space<ub>> to memref<?x?xi32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
            %cast_152 = memref.cast %129 : memref<256xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            func.call @vsub_2d_int32_t(%cast_149, %cast_150, %cast_151, %cast_152) : (memref<?x?xi32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xi32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xi32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
            %130 = hivm.hir.pointer_cast(%c13568_i64) : memref<32x32xf32, #hivm.address_space<ub>>
            %collapse_shape_153 = memref.collapse_shape %128 [[0, 1]] : memref<32x32xi32, #hivm.address_space<ub>> into memref<1024xi32, #hivm.address_space<ub>>
            %collapse_shape_154 = memref.collapse_shape %130 [[0, 1]] : memref<32x32xf32, #hivm.address_space<ub>> into memref<1024xf32, #hivm.address_space<ub>>
            %cast_155 = memref.cast %collapse_shape_153 : memref<1024xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            %cast_156 = memref.cast %collapse_shape_154 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            func.call @vcast_int32_t_to_float_1d_with_mode(%cast_155, %cast_156, %c0_i32) : (memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32) -> ()
            %131 = arith.subi %102, %28 : i32
            %132 = arith.subi %131, %10 : i32
            %133 = arith.sitofp %132 : i32 to f32
            %134 = hivm.hir.pointer_cast(%c18688_i64) : memref<32x32xf32, #hivm.address_space<ub>>
            %collapse_shape_157 = memref.collapse_shape %134 [[0, 1]] : memref<32x32xf32, #hivm.address_space<ub>> into memref<1024xf32, #hivm.address_space<ub>>
            %cast_158 = memref.cast %collapse_shape_157 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            func.call @broadcast_scalar_float_to_1d(%133, %cast_158) : (f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
            %135 = hivm.hir.pointer_cast(%c13568_i64) : memref<32x32xi1, #hivm.address_space<ub>>
            %collapse_shape_159 = memref.collapse_shape %135 [[0, 1]] : memref<32x32xi1, #hivm.address_space<ub>> into memref<1024xi1, #hivm.address_space<ub>>
            %cast_160 = memref.cast %collapse_shape_154 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            %cast_161 = memref.cast %collapse_shape_157 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            %cast_162 = memref.cast %collapse_shape_159 : memref<1024xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
            func.call @vcmp_ge_1d_float(%cast_160, %cast_161, %cast_162) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
            %136 = hivm.hir.pointer_cast(%c22784_i64) : memref<32x32xf32, #hivm.address_space<ub>>
            %collapse_shape_163 = memref.collapse_shape %136 [[0, 1]] : memref<32x32xf32, #hivm.address_space<ub>> into memref<1024xf32, #hivm.address_space<ub>>
            %137 = hivm.hir.pointer_cast(%c26880_i64) : memref<16xf32, #hivm.address_space<ub>>
            %cast_164 = memref.cast %collapse_shape_159 : memref<1024xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
            %cast_165 = memref.cast %collapse_shape_93 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            %cast_166 = memref.cast %collapse_shape_163 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            %cast_167 = memref.cast %137 : memref<16xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
            func.call @vsel_vs_1d_float(%cast_164, %cast_165, %cst_4, %cast_166, %cast_167) : (memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
            scf.yield %136 : memref<32x32xf32, #hivm.address_space<ub>>
          } else {
            scf.yield %104 : memref<32x32xf32, #hivm.address_space<ub>>
          }
          %109 = hivm.hir.pointer_cast(%c26944_i64) : memref<32x1xf32, #hivm.address_space<ub>>
          %110 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_97 = memref.cast %108 : memref<32x32xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_98 = memref.cast %109 : memref<32x1xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_99 = memref.cast %110 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @enablevc_reduce_max_ar_float(%cast_97, %cast_98, %cast_99, %cst_4) : (memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, f32) -> ()
          %collapse_shape_100 = memref.collapse_shape %109 [[0, 1]] : memref<32x1xf32, #hivm.address_space<ub>> into memref<32xf32, #hivm.address_space<ub>>
          %111 = hivm.hir.pointer_cast(%c26944_i64) : memref<32xf32, #hivm.address_space<ub>>
          %112 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_101 = memref.cast %58 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_102 = memref.cast %collapse_shape_100 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_103 = memref.cast %111 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_104 = memref.cast %112 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vmax_1d_float(%cast_101, %cast_102, %cast_103, %cast_104) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %expand_shape_105 = memref.expand_shape %111 [[0, 1]] output_shape [32, 1] : memref<32xf32, #hivm.address_space<ub>> into memref<32x1xf32, #hivm.address_space<ub>>
          %113 = hivm.hir.pointer_cast(%c22784_i64) : memref<32x32xf32, #hivm.address_space<ub>>
          %114 = hivm.hir.pointer_cast(%c27072_i64) : memref<256xf32, #hivm.address_space<ub>>
          %cast_106 = memref.cast %108 : memref<32x32xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_107 = memref.cast %expand_shape_105 : memref<32x1xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_108 = memref.cast %113 : memref<32x32xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_109 = memref.cast %114 : memref<256xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vsub_2d_float(%cast_106, %cast_107, %cast_108, %cast_109) : (memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %115 = hivm.hir.pointer_cast(%c22784_i64) : memref<32x32xf32, #hivm.address_space<ub>>
          %collapse_shape_110 = memref.collapse_shape %113 [[0, 1]] : memref<32x32xf32, #hivm.address_space<ub>> into memref<1024xf32, #hivm.address_space<ub>>
          %collapse_shape_111 = memref.collapse_shape %115 [[0, 1]] : memref<32x32xf32, #hivm.address_space<ub>> into memref<1024xf32, #hivm.address_space<ub>>
          %116 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_112 = memref.cast %collapse_shape_110 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_113 = memref.cast %collapse_shape_111 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_114 = memref.cast %116 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vexp_1d_float(%cast_112, %cast_113, %cast_114) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %117 = hivm.hir.pointer_cast(%c28096_i64) : memref<32xf32, #hivm.address_space<ub>>
          %118 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_115 = memref.cast %58 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_116 = memref.cast %111 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_117 = memref.cast %117 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_118 = memref.cast %118 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vsub_1d_float(%cast_115, %cast_116, %cast_117, %cast_118) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %subview_119 = memref.subview %94[%arg48, 0] [1, 32] [1, 1] : memref<4x32xf32, #hivm.address_space<ub>> to memref<32xf32, strided<[1], offset: ?>, #hivm.address_space<ub>>
          %119 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_120 = memref.cast %117 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_121 = memref.cast %subview_119 : memref<32xf32, strided<[1], offset: ?>, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_122 = memref.cast %119 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vexp_1d_float(%cast_120, %cast_121, %cast_122) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %120 = hivm.hir.pointer_cast(%c28224_i64) : memref<32xf32, #hivm.address_space<ub>>
          %121 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_123 = memref.cast %arg49 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_124 = memref.cast %subview_119 : memref<32xf32, strided<[1], offset: ?>, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_125 = memref.cast %120 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_126 = memref.cast %121 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vmul_1d_float(%cast_123, %cast_124, %cast_125, %cast_126) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %122 = hivm.hir.pointer_cast(%c28352_i64) : memref<32x1xf32, #hivm.address_space<ub>>
          %123 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_127 = memref.cast %115 : memref<32x32xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_128 = memref.cast %122 : memref<32x1xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_129 = memref.cast %123 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @enablevc_reduce_sum_ar_float(%cast_127, %cast_128, %cast_129, %cst_3) : (memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, f32) -> ()
          %collapse_shape_130 = memref.collapse_shape %122 [[0, 1]] : memref<32x1xf32, #hivm.address_space<ub>> into memref<32xf32, #hivm.address_space<ub>>
          %124 = hivm.hir.pointer_cast(%c28480_i64) : memref<32xf32, #hivm.address_space<ub>>
          %125 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_131 = memref.cast %120 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_132 = memref.cast %collapse_shape_130 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_133 = memref.cast %124 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_134 = memref.cast %125 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vadd_1d_float(%cast_131, %cast_132, %cast_133, %cast_134) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %126 = hivm.hir.pointer_cast(%c22784_i64) : memref<32x32xf16, #hivm.address_space<ub>>
          %collapse_shape_135 = memref.collapse_shape %126 [[0, 1]] : memref<32x32xf16, #hivm.address_space<ub>> into memref<1024xf16, #hivm.address_space<ub>>
          %cast_136 = memref.cast %collapse_shape_111 : memref<1024xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_137 = memref.cast %collapse_shape_135 : memref<1024xf16, #hivm.address_space<ub>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vcast_float_to_half_1d_with_mode(%cast_136, %cast_137, %c0_i32) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32) -> ()
          %subview_138 = memref.subview %view_10[%arg48, 0, 0] [1, 64, 32] [1, 1, 1] : memref<4x64x32xf16, #hivm.address_space<gm>> to memref<1x64x32xf16, strided<[2048, 32, 1], offset: ?>, #hivm.address_space<gm>>
          %collapse_shape_139 = memref.collapse_shape %subview_138 [[0, 1], [2]] : memref<1x64x32xf16, strided<[2048, 32, 1], offset: ?>, #hivm.address_space<gm>> into memref<64x32xf16, strided<[32, 1], offset: ?>, #hivm.address_space<gm>>
          %subview_140 = memref.subview %collapse_shape_139[%20, 0] [32, 32] [1, 1] {to_be_bubbled_slice} : memref<64x32xf16, strided<[32, 1], offset: ?>, #hivm.address_space<gm>> to memref<32x32xf16, strided<[32, 1], offset: ?>, #hivm.address_space<gm>>
          %collapse_shape_141 = memref.collapse_shape %subview_140 [[0, 1]] : memref<32x32xf16, strided<[32, 1], offset: ?>, #hivm.address_space<gm>> into memref<1024xf16, strided<[1], offset: ?>, #hivm.address_space<gm>>
          %cast_142 = memref.cast %collapse_shape_135 : memref<1024xf16, #hivm.address_space<ub>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_143 = memref.cast %collapse_shape_141 : memref<1024xf16, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<gm>>
          func.call @store_ubuf_to_gm_1d_half(%cast_142, %cast_143, %c0_i32) : (memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<gm>>, i32) -> ()
          %cast_144 = memref.cast %111 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_145 = memref.cast %58 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @copy_ubuf_to_ubuf_1d_float(%cast_144, %cast_145, %c0_i32, %cst_3) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, f32) -> ()
          scf.yield %124 : memref<32xf32, #hivm.address_space<ub>>
        } {hivm.loop_core_type = #hivm.tcore_type<VECTOR>, multibuffer_unroll_factor = 4 : i32}
        %subview_87 = memref.subview %view[0, %20, 0] [4, 32, 64] [1, 1, 1] {to_be_bubbled_slice} : memref<4x64x64xf32, #hivm.address_space<gm>> to memref<4x32x64xf32, strided<[4096, 64, 1], offset: ?>, #hivm.address_space<gm>>
        %96 = scf.for %arg48 = %c0 to %93 step %c1 iter_args(%arg49 = %arg47) -> (memref<32x64xf32, #hivm.address_space<ub>>) {
          %subview_88 = memref.subview %94[%arg48, 0] [1, 32] [1, 1] : memref<4x32xf32, #hivm.address_space<ub>> to memref<32xf32, strided<[1], offset: ?>, #hivm.address_space<ub>>
          %expand_shape_89 = memref.expand_shape %subview_88 [[0, 1]] output_shape [32, 1] : memref<32xf32, strided<[1], offset: ?>, #hivm.address_space<ub>> into memref<32x1xf32, strided<[1, 1], offset: ?>, #hivm.address_space<ub>>
          %98 = hivm.hir.pointer_cast(%c28608_i64) : memref<32x64xf32, #hivm.address_space<ub>>
          %99 = hivm.hir.pointer_cast(%c36800_i64) : memref<256xf32, #hivm.address_space<ub>>
          %cast_90 = memref.cast %arg49 : memref<32x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_91 = memref.cast %expand_shape_89 : memref<32x1xf32, strided<[1, 1], offset: ?>, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_92 = memref.cast %98 : memref<32x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
          %cast_93 = memref.cast %99 : memref<256xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vmul_2d_float(%cast_90, %cast_91, %cast_92, %cast_93) : (memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          %subview_94 = memref.subview %subview_87[%arg48, 0, 0] [1, 32, 64] [1, 1, 1] : memref<4x32x64xf32, strided<[4096, 64, 1], offset: ?>, #hivm.address_space<gm>> to memref<32x64xf32, strided<[64, 1], offset: ?>, #hivm.address_space<gm>>
          %100 = hivm.hir.pointer_cast(%c37824_i64) : memref<32x64xf32, #hivm.address_space<ub>>
          %collapse_shape_95 = memref.collapse_shape %subview_94 [[0, 1]] : memref<32x64xf32, strided<[64, 1], offset: ?>, #hivm.address_space<gm>> into memref<2048xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
          %collapse_shape_96 = memref.collapse_shape %100 [[0, 1]] : memref<32x64xf32, #hivm.address_space<ub>> into memref<2048xf32, #hivm.address_space<ub>>
          %cast_97 = memref.cast %collapse_shape_95 : memref<2048xf32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>
          %cast_98 = memref.cast %collapse_shape_96 : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @load_gm_to_ubuf_1d_float(%cast_97, %cast_98, %c0_i32, %cst_3, %c0) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, f32, index) -> ()
          %101 = hivm.hir.pointer_cast(%c46016_i64) : memref<32x64xf32, #hivm.address_space<ub>>
          %collapse_shape_99 = memref.collapse_shape %98 [[0, 1]] : memref<32x64xf32, #hivm.address_space<ub>> into memref<2048xf32, #hivm.address_space<ub>>
          %collapse_shape_100 = memref.collapse_shape %101 [[0, 1]] : memref<32x64xf32, #hivm.address_space<ub>> into memref<2048xf32, #hivm.address_space<ub>>
          %102 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
          %cast_101 = memref.cast %collapse_shape_96 : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_102 = memref.cast %collapse_shape_99 : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_103 = memref.cast %collapse_shape_100 : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          %cast_104 = memref.cast %102 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
          func.call @vadd_1d_float(%cast_101, %cast_102, %cast_103, %cast_104) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
          scf.yield %101 : memref<32x64xf32, #hivm.address_space<ub>>
        } {hivm.loop_core_type = #hivm.tcore_type<VECTOR>, multibuffer_unroll_factor = 4 : i32}
        scf.yield %95, %96 : memref<32xf32, #hivm.address_space<ub>>, memref<32x64xf32, #hivm.address_space<ub>>
      }
      %62 = hivm.hir.pointer_cast(%c54208_i64) : memref<32xi32, #hivm.address_space<ub>>
      %63 = hivm.hir.pointer_cast(%c0_i64) : memref<0xi32, #hivm.address_space<ub>>
      %cast_18 = memref.cast %23 : memref<32xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_19 = memref.cast %62 : memref<32xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_20 = memref.cast %63 : memref<0xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vadds_vs_1d_int32_t(%cast_18, %28, %cast_19, %cast_20) : (memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32, memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %64 = hivm.hir.pointer_cast(%c54208_i64) : memref<32xf32, #hivm.address_space<ub>>
      %cast_21 = memref.cast %62 : memref<32xi32, #hivm.address_space<ub>> to memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_22 = memref.cast %64 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vcast_int32_t_to_float_1d_with_mode(%cast_21, %cast_22, %c0_i32) : (memref<?xi32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32) -> ()
      %65 = hivm.hir.pointer_cast(%c54208_i64) : memref<32xi1, #hivm.address_space<ub>>
      %cast_23 = memref.cast %64 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_24 = memref.cast %15 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_25 = memref.cast %65 : memref<32xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vcmp_lt_1d_float(%cast_23, %cast_24, %cast_25) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %66 = hivm.hir.pointer_cast(%c54336_i64) : memref<32xf32, #hivm.address_space<ub>>
      %67 = hivm.hir.pointer_cast(%c54464_i64) : memref<16xf32, #hivm.address_space<ub>>
      %cast_26 = memref.cast %65 : memref<32xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_27 = memref.cast %61#0 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_28 = memref.cast %66 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_29 = memref.cast %67 : memref<16xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vsel_vs_1d_float(%cast_26, %cast_27, %cst_3, %cast_28, %cast_29) : (memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %68 = hivm.hir.pointer_cast(%c54528_i64) : memref<32xi1, #hivm.address_space<ub>>
      %cast_30 = memref.cast %66 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_31 = memref.cast %4 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_32 = memref.cast %68 : memref<32xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vcmp_eq_1d_float(%cast_30, %cast_31, %cast_32) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %69 = hivm.hir.pointer_cast(%c54560_i64) : memref<32xf32, #hivm.address_space<ub>>
      %70 = hivm.hir.pointer_cast(%c54688_i64) : memref<16xf32, #hivm.address_space<ub>>
      %cast_33 = memref.cast %68 : memref<32xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_34 = memref.cast %66 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_35 = memref.cast %69 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_36 = memref.cast %70 : memref<16xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vsel_sv_1d_float(%cast_33, %cst_1, %cast_34, %cast_35, %cast_36) : (memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>, f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %expand_shape = memref.expand_shape %69 [[0, 1]] output_shape [32, 1] : memref<32xf32, #hivm.address_space<ub>> into memref<32x1xf32, #hivm.address_space<ub>>
      %71 = hivm.hir.pointer_cast(%c54752_i64) : memref<32x64xf32, #hivm.address_space<ub>>
      %72 = hivm.hir.pointer_cast(%c62944_i64) : memref<256xf32, #hivm.address_space<ub>>
      %cast_37 = memref.cast %61#1 : memref<32x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
      %cast_38 = memref.cast %expand_shape : memref<32x1xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
      %cast_39 = memref.cast %71 : memref<32x64xf32, #hivm.address_space<ub>> to memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
      %cast_40 = memref.cast %72 : memref<256xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vdiv_2d_float(%cast_37, %cast_38, %cast_39, %cast_40) : (memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf32, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %73 = hivm.hir.pointer_cast(%c63968_i64) : memref<32xf16, #hivm.address_space<ub>>
      %74 = hivm.hir.pointer_cast(%c64032_i64) : memref<48xf16, #hivm.address_space<ub>>
      %cast_41 = memref.cast %68 : memref<32xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_42 = memref.cast %73 : memref<32xf16, #hivm.address_space<ub>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_43 = memref.cast %74 : memref<48xf16, #hivm.address_space<ub>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vcast_bool_to_half_1d_with_temp(%cast_41, %cast_42, %cast_43, %c4_i32) : (memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32) -> ()
      %expand_shape_44 = memref.expand_shape %73 [[0, 1]] output_shape [32, 1] : memref<32xf16, #hivm.address_space<ub>> into memref<32x1xf16, #hivm.address_space<ub>>
      %75 = hivm.hir.pointer_cast(%c64128_i64) : memref<32x64xf16, #hivm.address_space<ub>>
      %76 = hivm.hir.pointer_cast(%c68224_i64) : memref<512xf16, #hivm.address_space<ub>>
      %cast_45 = memref.cast %expand_shape_44 : memref<32x1xf16, #hivm.address_space<ub>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
      %cast_46 = memref.cast %75 : memref<32x64xf16, #hivm.address_space<ub>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
      %cast_47 = memref.cast %76 : memref<512xf16, #hivm.address_space<ub>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @broadcast_last_axis_align_2d_half(%cast_45, %cast_46, %cast_47) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %77 = hivm.hir.pointer_cast(%c64128_i64) : memref<32x64xi1, #hivm.address_space<ub>>
      %collapse_shape_48 = memref.collapse_shape %75 [[0, 1]] : memref<32x64xf16, #hivm.address_space<ub>> into memref<2048xf16, #hivm.address_space<ub>>
      %collapse_shape_49 = memref.collapse_shape %77 [[0, 1]] : memref<32x64xi1, #hivm.address_space<ub>> into memref<2048xi1, #hivm.address_space<ub>>
      %cast_50 = memref.cast %collapse_shape_48 : memref<2048xf16, #hivm.address_space<ub>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_51 = memref.cast %collapse_shape_49 : memref<2048xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vcmps_eq_1d_half(%cast_50, %cst, %cast_51) : (memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>, f16, memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %78 = hivm.hir.pointer_cast(%c64128_i64) : memref<32x64xi1, #hivm.address_space<ub>>
      %collapse_shape_52 = memref.collapse_shape %78 [[0, 1]] : memref<32x64xi1, #hivm.address_space<ub>> into memref<2048xi1, #hivm.address_space<ub>>
      %79 = hivm.hir.pointer_cast(%c0_i64) : memref<0xi1, #hivm.address_space<ub>>
      %cast_53 = memref.cast %collapse_shape_49 : memref<2048xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_54 = memref.cast %collapse_shape_52 : memref<2048xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_55 = memref.cast %79 : memref<0xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vnot_1d_bool(%cast_53, %cast_54, %cast_55) : (memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %80 = hivm.hir.pointer_cast(%c69248_i64) : memref<32x64xf32, #hivm.address_space<ub>>
      %collapse_shape_56 = memref.collapse_shape %71 [[0, 1]] : memref<32x64xf32, #hivm.address_space<ub>> into memref<2048xf32, #hivm.address_space<ub>>
      %collapse_shape_57 = memref.collapse_shape %80 [[0, 1]] : memref<32x64xf32, #hivm.address_space<ub>> into memref<2048xf32, #hivm.address_space<ub>>
      %81 = hivm.hir.pointer_cast(%c77440_i64) : memref<16xf32, #hivm.address_space<ub>>
      %cast_58 = memref.cast %collapse_shape_52 : memref<2048xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_59 = memref.cast %collapse_shape_56 : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_60 = memref.cast %collapse_shape_57 : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_61 = memref.cast %81 : memref<16xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vsel_sv_1d_float(%cast_58, %cst_3, %cast_59, %cast_60, %cast_61) : (memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>, f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %82 = hivm.hir.pointer_cast(%c54560_i64) : memref<32xf32, #hivm.address_space<ub>>
      %83 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
      %cast_62 = memref.cast %69 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_63 = memref.cast %82 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_64 = memref.cast %83 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vln_1d_float(%cast_62, %cast_63, %cast_64) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %84 = hivm.hir.pointer_cast(%c54560_i64) : memref<32xf32, #hivm.address_space<ub>>
      %85 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, #hivm.address_space<ub>>
      %cast_65 = memref.cast %58 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_66 = memref.cast %82 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_67 = memref.cast %84 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_68 = memref.cast %85 : memref<0xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vadd_1d_float(%cast_65, %cast_66, %cast_67, %cast_68) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %86 = hivm.hir.pointer_cast(%c77504_i64) : memref<32xf32, #hivm.address_space<ub>>
      %87 = hivm.hir.pointer_cast(%c77632_i64) : memref<16xf32, #hivm.address_space<ub>>
      %cast_69 = memref.cast %68 : memref<32xi1, #hivm.address_space<ub>> to memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_70 = memref.cast %84 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_71 = memref.cast %86 : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_72 = memref.cast %87 : memref<16xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vsel_sv_1d_float(%cast_69, %cst_2, %cast_70, %cast_71, %cast_72) : (memref<?xi1, strided<[?], offset: ?>, #hivm.address_space<ub>>, f32, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>) -> ()
      %reinterpret_cast = memref.reinterpret_cast %arg6 to offset: [%88], sizes: [64, 64], strides: [%17, 1] : memref<?xf16, #hivm.address_space<gm>> to memref<64x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
      %subview = memref.subview %reinterpret_cast[%20, 0] [32, 64] [1, 1] {to_be_bubbled_slice} : memref<64x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<32x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
      %89 = hivm.hir.pointer_cast(%c69248_i64) : memref<32x64xf16, #hivm.address_space<ub>>
      %collapse_shape_73 = memref.collapse_shape %89 [[0, 1]] : memref<32x64xf16, #hivm.address_space<ub>> into memref<2048xf16, #hivm.address_space<ub>>
      %cast_74 = memref.cast %collapse_shape_57 : memref<2048xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_75 = memref.cast %collapse_shape_73 : memref<2048xf16, #hivm.address_space<ub>> to memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>
      func.call @vcast_float_to_half_1d_with_mode(%cast_74, %cast_75, %c0_i32) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf16, strided<[?], offset: ?>, #hivm.address_space<ub>>, i32) -> ()
      %subview_76 = memref.subview %89[0, 0] [%91, 64] [1, 1] : memref<32x64xf16, #hivm.address_space<ub>> to memref<?x64xf16, strided<[64, 1]>, #hivm.address_space<ub>>
      %subview_77 = memref.subview %subview[0, 0] [%91, 64] [1, 1] : memref<32x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>
      %cast_78 = memref.cast %subview_76 : memref<?x64xf16, strided<[64, 1]>, #hivm.address_space<ub>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>
      %cast_79 = memref.cast %subview_77 : memref<?x64xf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>> to memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>
      func.call @store_ubuf_to_gm_2d_half(%cast_78, %cast_79, %c0_i32) : (memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<ub>>, memref<?x?xf16, strided<[?, ?], offset: ?>, #hivm.address_space<gm>>, i32) -> ()
      %reinterpret_cast_80 = memref.reinterpret_cast %arg7 to offset: [%44], sizes: [64], strides: [1] : memref<?xf32, #hivm.address_space<gm>> to memref<64xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
      %subview_81 = memref.subview %reinterpret_cast_80[%20] [32] [1] {to_be_bubbled_slice} : memref<64xf32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<32xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
      %subview_82 = memref.subview %86[0] [%91] [1] : memref<32xf32, #hivm.address_space<ub>> to memref<?xf32, strided<[1]>, #hivm.address_space<ub>>
      %subview_83 = memref.subview %subview_81[0] [%91] [1] : memref<32xf32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xf32, strided<[1], offset: ?>, #hivm.address_space<gm>>
      %cast_84 = memref.cast %subview_82 : memref<?xf32, strided<[1]>, #hivm.address_space<ub>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>
      %cast_85 = memref.cast %subview_83 : memref<?xf32, strided<[1], offset: ?>, #hivm.address_space<gm>> to memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>
      func.call @store_ubuf_to_gm_1d_float(%cast_84, %cast_85, %c0_i32) : (memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<ub>>, memref<?xf32, strided<[?], offset: ?>, #hivm.address_space<gm>>, i32) -> ()
    }
    return
  }
}
